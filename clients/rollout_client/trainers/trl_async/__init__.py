"""The service as rollout worker and weight transfer of TRL's experimental `AsyncGRPOTrainer` (1.16). Needs `trl`.

    transfer = ServiceWeightTransfer(client)
    worker = ServiceRolloutWorker(AsyncRolloutClient(url), dataset, args, weight_transfer=transfer, task_name="math")
    trainer = AsyncGRPOTrainer(model, args=args, train_dataset=dataset, rollout_worker=worker, weight_transfer=transfer)

The rewards are those of the environments; the trainer's reward functions are not called. Set `args.token_budget` (0 for
batches of a fixed number of samples): without it, the trainer asks a vLLM server for it.
"""

from rollout_client.trainers.trl_async.worker import ServiceRolloutWorker, ServiceWeightTransfer, WorkerFailed

__all__ = ["ServiceRolloutWorker", "ServiceWeightTransfer", "WorkerFailed"]
