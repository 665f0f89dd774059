//! Typed ids and the three file formats (trace, profile, tables): write, validate, memory-map, view.
//!
//! Every file is a little-endian safetensors container. A reader maps the file, checks all of it once and then returns
//! slices of the map: nothing is copied, and unchecked data is never returned. Errors name the file (if there is one),
//! the tensor or field, what was found and what was expected. This crate's README specifies the formats.
//!
//! ```
//! use semmoe_tables::{ExpertId, LayerIdx, ModelInfo, Phase, ProfileBuilder, Provenance, TokenId, Trace, TraceBuilder};
//!
//! let model = ModelInfo {
//!     model: "tiny".into(),
//!     tokenizer_sha256: None,
//!     num_experts: 4,
//!     top_k: 2,
//!     vocab_size: 10,
//!     num_hidden_layers: 1,
//!     layer_ids: vec![0],
//! };
//! let provenance = Provenance { source: "by hand".into(), created: "2026-01-01T00:00:00Z".into() };
//! let mut recorded = TraceBuilder::new(model.clone(), provenance.clone())?;
//! recorded.push(&[7, 3, 7], 2, &[0, 1, 2, 3, 0, 3], None)?; // ids, prompt tokens, routes [n, L, k], no weights
//! let trace = Trace::from_bytes(recorded.to_bytes()?)?; // the same bytes as in the file
//! let route = trace.request(0).route(2, LayerIdx::new(0)).expect("recorded");
//! assert_eq!(route.experts().collect::<Vec<_>>(), [ExpertId::new(0), ExpertId::new(3)]);
//!
//! let mut counts = ProfileBuilder::new(model, provenance, Phase::All)?;
//! counts.add_trace(&trace)?;
//! let profile = counts.finish()?;
//! assert_eq!(profile.row(LayerIdx::new(0), TokenId::new(7)).counts, [2, 1, 1]); // of experts 0, 1 and 3
//! # Ok::<(), semmoe_tables::FormatError>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `ids` | `TokenId`, `ExpertId`, `LayerIdx`, `GroupId`, `RankId` |
//! | `model` | the model that a file is about, and the origin of its data |
//! | `container` | safetensors header, aligned storage, digest, atomic write |
//! | `trace`, `trace_check`, `trace_builder` | requests with the experts of each token |
//! | `trace_rows`, `trace_writer` | traces of any size: read request by request, written as requests arrive |
//! | `prompt_split` | requests divided by their prompts, independently for each purpose |
//! | `phase`, `profile`, `profile_builder`, `profile_without` | the number of times that each token activated each expert |
//! | `profile_writer` | profiles of any size, written row by row |
//! | `placement` | the group that holds each expert |
//! | `copies`, `domains` | the replica of an expert that each rank uses; groups that hold each other's experts |
//! | `tables`, `tables_builder`, `attention` | the solver's output for gateways and workers |
//! | `arrays` | integers in safetensors files written by other programs |
//! | `checkpoint_config`, `model_shape` | a checkpoint's `config.json`: keys, bounded values, the model's shape |
//! | `embeddings` | the input embeddings of a checkpoint |
//! | `export` | placements in the formats that engines read |
//! | `permute` | checkpoints whose contiguous placement is E |
//! | `parallel` | independent jobs on a few threads |
//! | `likely` | the likeliest group for a token, by T and A, for workers, the solver and `evaluate` |
//! | `even` | spreads the tokens of a step evenly over groups by expected shares, for workers and `evaluate` |
//! | `score` | rows of T summed over a prompt, for the gateway, the solver and `evaluate` |

#[cfg(target_endian = "big")]
compile_error!("the formats are little-endian, and their slices are borrowed directly from the file");

#[macro_use]
mod format_file;

mod arrays;
mod attention;
mod checkpoint_config;
mod container;
mod copies;
mod domains;
mod embeddings;
mod error;
mod even;
pub mod export;
mod ids;
mod likely;
mod model;
mod model_shape;
mod parallel;
pub mod permute;
mod phase;
mod placement;
mod profile;
mod profile_builder;
mod profile_without;
mod profile_writer;
mod prompt_split;
mod replicas;
mod score;
mod tables;
mod tables_builder;
mod trace;
mod trace_builder;
mod trace_check;
mod trace_rows;
mod trace_writer;

pub use arrays::{Array, Arrays};
pub use attention::{Attention, GroupLabels, MAX_LABELS, NO_GROUP, TpParts};
pub use checkpoint_config::{CheckpointConfig, ConfigError};
pub use container::{directory_of, write_atomically};
pub use copies::ExpertCopies;
pub use domains::{Domains, NoDomains};
pub use embeddings::{Embeddings, EmbeddingsError};
pub use error::FormatError;
pub use even::{EvenGroups, PlacedBy};
pub use ids::{ExpertId, GroupId, LayerIdx, RankId, TokenId};
pub use likely::{LikelyGroup, group_shares, likeliest_group};
pub use model::{MAX_LAYER_ROWS, ModelInfo, Provenance};
pub use parallel::in_parallel;
pub use phase::Phase;
pub use placement::Placement;
pub use profile::{Profile, ProfileRow};
pub use profile_builder::ProfileBuilder;
pub use profile_writer::ProfileWriter;
pub use prompt_split::PromptSplit;
pub use replicas::Replicas;
pub use score::Score;
pub use tables::Tables;
pub use tables_builder::TablesBuilder;
pub use trace::{ByWidth, ExpertRows, Route, Trace, TraceRequest, UNKNOWN_EXPERT, mix64};
pub use trace_builder::TraceBuilder;
pub use trace_check::RequestCheck;
pub use trace_rows::TraceRows;
pub use trace_writer::TraceWriter;
