//! Cost models, strategy search and the switch policy: pure.
