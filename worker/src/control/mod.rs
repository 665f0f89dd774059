//! How a unit's rank processes find each other, and the messages of the control link.
//!
//! | module | what |
//! |---|---|
//! | `frame` | length-prefixed, bounded JSON on a byte stream |
//! | `patience` | blocking reads and accepts that end at a deadline or when the process stops |
//! | `secret`, `auth` | the unit's secret, and how both ends of a connection prove that they know it |
//! | `acceptor` | incoming connections, handled concurrently |
//! | `hello` | a rank's registration, and the check that two ranks match |
//! | `rendezvous` | registration with rank 0 |
//! | `carrier` | the data transport: shared memory where possible, otherwise TCP |
//! | `mesh` | data links between all pairs of ranks |
//! | `message` | messages of a control link while the unit is running |
//! | `link` | a control link: a reader and a writer thread |

mod acceptor;
mod auth;
mod carrier;
mod error;
mod frame;
mod hello;
pub(crate) mod link;
mod mesh;
pub(crate) mod message;
mod patience;
mod rendezvous;
mod secret;

pub use carrier::TransportChoice;
pub use error::RendezvousError;
pub(crate) use hello::Identity;
pub(crate) use patience::{Patience, listen};
pub(crate) use rendezvous::{Ends, Host, Location, join};
pub use secret::{Secret, SecretError};
