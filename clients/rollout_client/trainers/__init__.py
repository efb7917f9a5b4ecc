"""One module or package per trainer; several of them use `dataset_rows.py`. Each names the extra that it needs."""
