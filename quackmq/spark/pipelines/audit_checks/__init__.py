"""What the `audit` pipeline checks, by what its proof is based on.

`runs` checks offsets and producers' sequence numbers, `holes` explains offsets without a record,
`receipts` checks what subscriptions have consumed.
"""
