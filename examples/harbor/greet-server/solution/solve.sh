#!/bin/bash
cat > serve <<'PY'
#!/usr/bin/env python3
import os
from http.server import BaseHTTPRequestHandler, HTTPServer


class Greeter(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"Hello, {self.path[1:]}!".encode())


HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Greeter).serve_forever()
PY
chmod +x serve
