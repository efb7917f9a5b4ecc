"""Who may come in: keys, their scopes, and what each may use."""
