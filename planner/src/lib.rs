//! Cost models, strategy search, the switch policy as a pure state machine, and their simulator.
//!
//! Not built yet: the README's status table says so. The crate exists so that the layer test knows its place (layer 1:
//! pure, below everything that measures or acts) and so that nothing else grows into its job meanwhile.

pub mod policy;
