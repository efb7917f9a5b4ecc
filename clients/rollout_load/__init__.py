"""Load test of the rollout service with locust; `clients/locustfile.py` is its entry.

    options     the command line, environment variables, and how many users there are at a time
    samples     the samples that are posted                          users       the classes of users
    outcomes    the outcome of each response, and their totals       summary     the summary, and missed bounds
    events      connects all of it with locust, on one machine or many, and in its web interface

Of this repository it imports the client only.
"""
