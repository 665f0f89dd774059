//! One expert-parallel rank: loads a Hugging Face checkpoint, runs it with its peers, serves HTTP.

pub mod ep;
pub mod model;
