//! Open file limits: every connection to a client or an engine needs a file descriptor, and the system limits them.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::backends::StartError;

/// Maximum concurrent connections to the admin plane, and to the metrics listener.
pub(crate) const STATUS_CONNECTIONS: usize = 64;
/// File descriptors unavailable to data plane clients: for the connections of the other two listeners, and as many for
/// tables, certificates, probes and logs.
const RESERVED: u64 = 3 * STATUS_CONNECTIONS as u64;

/// Raises the soft limit on open files to the hard limit, as far as the system allows.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::warn!(%error, soft = limit.current, hard = limit.maximum, "cannot raise the limit on open files");
    }
}

/// Returns the number of concurrent connections that the data plane accepts: `wanted`, or as many as the limit on open
/// files permits.
///
/// # Errors
/// [`StartError::Files`] if the limit permits none.
pub(crate) fn connections(wanted: usize) -> Result<usize, StartError> {
    let Some(files) = getrlimit(Resource::Nofile).current else { return Ok(wanted) };
    let room = room(files);
    if room == 0 {
        return Err(StartError::Files { files, needed: RESERVED + 2 });
    }
    if room < wanted {
        tracing::warn!(
            files,
            "limits.connections" = wanted,
            accepted = room,
            needed = RESERVED + 2 * wanted as u64,
            "the limit on open files (ulimit -n) is too low for this many connections, so fewer are accepted concurrently"
        );
    }
    Ok(wanted.min(room))
}

/// Number of client connections that fit the limit; each may need another connection to an engine.
fn room(files: u64) -> usize {
    usize::try_from(files.saturating_sub(RESERVED) / 2).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_get_half_of_what_is_not_reserved() {
        for (files, expected) in [(0, 0), (193, 0), (194, 1), (1024, 416), (20_000, 9904)] {
            assert_eq!(room(files), expected, "{files}");
        }
    }
}
