"""The page that `GET /ui` serves: static files (`page/`), and what serves them."""
