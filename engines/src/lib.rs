//! What engines accept and return: requests, pins, loads, routed experts; and the one HTTP client.
