"""The methods that do I/O, once for asyncio and once without: `sync_client` is generated from `async_client`."""
