//! Validation of a rank's links to the others.

use std::io;

/// Checks that `links[p]` contains a link for every other rank p and that this rank's own slot is empty.
pub(super) fn check_links<T>(rank: usize, links: &[Option<T>]) -> io::Result<()> {
    let invalid = |detail: String| Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
    for (peer, link) in links.iter().enumerate() {
        if link.is_some() == (peer == rank) {
            return invalid(format!("rank {rank} needs a stream to exactly the other ranks: slot {peer} is wrong"));
        }
    }
    if rank >= links.len() {
        return invalid(format!("rank {rank} is out of range for a world size of {}", links.len()));
    }
    Ok(())
}
