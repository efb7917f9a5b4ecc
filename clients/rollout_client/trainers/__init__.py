"""One module or package per trainer; `shared/` holds what several of them use. Each names the extra that it needs."""
