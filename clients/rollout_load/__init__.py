"""Load test of the rollout service with locust: `users.py` has the classes of users, `report.py` options and report.

`clients/locustfile.py` is its entry. Of this repository it imports the client only.
"""
