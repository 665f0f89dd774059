//! Records traces from engines, builds and merges profiles.
