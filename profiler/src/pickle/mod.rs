//! Array files of others, read without trust: torch's `.pt`, NumPy's `.npy` and `.npz`.
//!
//! Written by hand, as Python's unpickler sizes its memo by an index in the file even where it may name no class: 9
//! bytes made CPython 3.11 take 4.3 GB (profiler/README.md has them).
//!
//! A `.pt` file is a zip archive with a pickle in it, and a pickle is a program. This reader is no interpreter of that
//! program: it knows the few opcodes that put tensors, lists, dicts, tuples, numbers and texts together, and refuses
//! everything else by its name. Nothing is imported, called or executed.
//!
//! The reader's memory is bounded by the file's own size (and a megabyte for small files): values are counted as they
//! are made, shapes are checked against the bytes that are there, and archives whose entries overlap or are compressed
//! are refused.
//!
//! | module | what |
//! |---|---|
//! | `source` | a file, or bytes in memory, read at offsets |
//! | `zip` | the directory of an archive of stored entries |
//! | `opcode` | names of all opcodes, and which are read |
//! | `value` | what a pickle holds: handles into one arena, so that cycles and depth cost nothing |
//! | `machine` | the opcodes, one after the other, on a bounded stack |
//! | `call` | the three things that a pickle may name and call |
//! | `array` | element types, shapes and strides, checked against their storage |
//! | `torch` | `.pt` files |
//! | `npy`, `npz` | NumPy's files |

mod array;
mod call;
mod error;
mod machine;
mod npy;
mod npz;
mod opcode;
mod source;
mod torch;
mod value;
mod zip;

pub use array::{Array, Element};
pub use error::PickleError;
pub use machine::read_pickle;
pub use npy::read_npy;
pub use npz::NpzFile;
pub use source::Source;
pub use torch::TorchFile;
pub use value::{Document, Storage, TensorRef, Value};
