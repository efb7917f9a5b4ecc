"""A load test of the rollout service with locust; `clients/locustfile.py` is its entry.

    options     what the command line and the environment say       users/      who calls, one file a class
    samples     what is posted                                       outcomes    what a response was worth
    totals      the metrics that locust does not have                shapes      how many users there are at a time
    summary     both kinds of metrics at the end of a run            thresholds  what makes a run fail
    report      the summary as text, JSON and HTML                   web_tab     the same while it runs, in the browser
    events      connects all of it with locust, on one machine or many

It knows the service's contract and the client alone.
"""
