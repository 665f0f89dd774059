//! A rank's links to the others.

use std::io;

/// Checks that there is a link to every other rank, `links[p]` to rank p, and none to itself.
pub(super) fn check_links<T>(rank: usize, links: &[Option<T>]) -> io::Result<()> {
    let invalid = |detail: String| Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
    for (peer, link) in links.iter().enumerate() {
        if link.is_some() == (peer == rank) {
            return invalid(format!("rank {rank} needs a stream for each other rank: slot {peer} is wrong"));
        }
    }
    if rank >= links.len() {
        return invalid(format!("rank {rank} is not below the world size {}", links.len()));
    }
    Ok(())
}
