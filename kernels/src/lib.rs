//! Dispatch and combine for expert parallelism: the CPU reference.
