"""`onceflow txn`: transactions in doubt, seen and settled by hand."""
