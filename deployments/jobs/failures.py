"""Every way in which a call of the job store can be refused. The ingress answers with problem documents."""

from deployments.failures import StoreFailure


class JobFailure(StoreFailure):
    """A call of the job store was not carried out."""


class JobUnknown(JobFailure):
    """The job never was, is another caller's, was deleted, or has expired."""

    status = 404
    name = "job-unknown"
    title = "The job is not known"


class KeyReused(JobFailure):
    """The key was sent before, with another request."""

    name = "idempotency-key-reused"
    title = "The Idempotency-Key belongs to another request; nothing was started"


class EventsAcknowledged(JobFailure):
    """Events that were acknowledged are not kept."""

    status = 410
    name = "events-acknowledged"
    title = "These events were acknowledged and are not kept"


class EventUnknown(JobFailure):
    """There is no event of this number yet."""

    name = "event-unknown"
    title = "The job has no such event"


class NoDataSet(JobFailure):
    """The job plays samples that were posted. Only a job over `samples_from` has a ledger."""

    name = "job-without-data-set"
    title = "The job has no data set, and so no cursor"


class JobsFull(JobFailure):
    """The jobs that are kept leave no room for another one."""

    status = 429
    name = "jobs-full"
    title = "The kept jobs leave no room for another one; nothing was started"
    # Kept jobs go when they are acknowledged, deleted or old.
    retry_after_s = 30


class JobsNotConfigured(JobFailure):
    """The config has no `jobs`."""

    status = 501
    name = "jobs-not-configured"
    title = "The service keeps no jobs"
