//! Routing policies, prices and load accounts: pure.
