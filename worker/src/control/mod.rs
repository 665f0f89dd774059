//! How the rank processes of one unit find each other, and the messages of the control link.
//!
//! | module | what |
//! |---|---|
//! | `frame` | length-prefixed, bounded JSON on a byte stream |
//! | `patience` | blocking reads and accepts that end at a deadline or when the process is to stop |
//! | `secret`, `auth` | the unit's secret, and how both ends of a connection prove that they know it |
//! | `door` | incoming connections, handled concurrently |
//! | `hello` | how a rank introduces itself, and whether two ranks belong together |
//! | `rendezvous` | registration with rank 0 |
//! | `carrier` | the carrier of data: shared memory where possible, else TCP |
//! | `mesh` | the data links, one between every two ranks |
//! | `message` | messages of a control link once the unit runs |
//! | `link` | a control link: one thread reads, one writes |

mod auth;
mod carrier;
mod door;
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
pub use secret::Secret;
