//! The gateway: data plane, admin plane, backends, one reloadable snapshot.
