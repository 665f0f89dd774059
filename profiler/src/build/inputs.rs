//! The first pass over traces: checks every request, decides which to count, and counts each token's occurrences.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use semmoe_tables::{
    ExpertRows, FormatError, ModelInfo, Phase, PromptSplit, TraceRequest, TraceRows, TraceWriter, in_parallel,
};

use crate::origin::Origin;
use crate::{BadRecord, ProfilerError, Progress};

/// Requests are processed in chunks with this many bytes of routes, whose pages are released afterwards.
pub(super) const PIECE_BYTES: usize = 8 << 20;

/// How a request is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Counted,
    HeldOut,
    Bad,
}

/// Opened traces of one model.
#[derive(Debug)]
pub(super) struct Inputs {
    pub(super) model: ModelInfo,
    pub(super) origin: Origin,
    pub(super) files: Vec<InputFile>,
    /// Files that are no longer readable as traces.
    pub(super) unreadable: Vec<BadRecord>,
    /// Estimated number of requests in the unreadable files, from their size relative to the others; at least one each.
    pub(super) lost: usize,
}

#[derive(Debug)]
pub(super) struct InputFile {
    pub(super) path: PathBuf,
    pub(super) rows: TraceRows,
    /// One per request, filled in by the check.
    pub(super) fates: Vec<Fate>,
}

/// A range of requests in one file.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) file: usize,
    pub(super) requests: Range<usize>,
    pub(super) tokens: usize,
}

/// The result of the first pass.
#[derive(Debug)]
pub(super) struct Checked {
    /// \[V\]: counted occurrences that have a known route in at least one layer.
    pub(super) occurrences: Vec<u64>,
    pub(super) bad: Vec<BadRecord>,
    /// Number of counted requests; `held_out` is the number of held-out requests.
    pub(super) counted: usize,
    pub(super) held_out: usize,
}

/// Selects the requests to hold out: about `share` of them, according to `split`.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeftOut {
    pub(super) share: f64,
    pub(super) split: PromptSplit,
}

impl LeftOut {
    fn has(self, request: TraceRequest<'_>) -> bool {
        self.split.position(request) < self.share
    }
}

/// Returns the positions in a request that belong to a phase.
pub(super) fn positions(request: TraceRequest<'_>, phase: Phase) -> Range<usize> {
    let (prompt, all) = (request.prompt_len(), request.token_ids().len());
    match phase {
        Phase::Prefill => 0..prompt,
        Phase::Decode => prompt..all,
        Phase::All => 0..all,
    }
}

impl Inputs {
    /// Opens the traces; the first determines the model. Entirely damaged files are skipped, unless no other is left.
    pub(super) fn open(paths: &[&Path]) -> Result<Self, ProfilerError> {
        let mut files = Vec::with_capacity(paths.len());
        let (mut model, mut origin): (Option<ModelInfo>, _) = (None, Origin::default());
        let mut damaged = Vec::new();
        for &path in paths {
            let rows = match TraceRows::open(path) {
                Ok(rows) => rows,
                Err(error) if is_damage(&error) => {
                    damaged.push((path, error));
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            match &mut model {
                Some(model) => model.adopt(rows.model()).map_err(|error| error.in_file(path))?,
                None => model = Some(rows.model().clone()),
            }
            origin.add(rows.provenance());
            files.push(InputFile { path: path.to_path_buf(), rows, fates: Vec::new() });
        }
        let Some(model) = model else {
            let first = damaged.into_iter().next();
            return Err(first.map_or(ProfilerError::NoInput("trace"), |(_, error)| error.into()));
        };
        let lost = damaged.iter().map(|(path, _)| requests_in(path, &files)).sum();
        let unreadable = damaged.into_iter().map(|(path, error)| bad_file(path, error)).collect();
        Ok(Inputs { model, origin, files, unreadable, lost })
    }

    pub(super) fn tokens(&self) -> u64 {
        self.files.iter().map(|file| file.rows.tokens() as u64).sum()
    }

    /// Splits all requests, in order, into chunks that are small relative to memory, except for single long requests.
    pub(super) fn pieces(&self) -> Vec<Piece> {
        let row_bytes = self.model.layers() * usize::from(self.model.top_k) * 2;
        let most = (PIECE_BYTES / row_bytes.max(1)).max(1);
        let mut pieces: Vec<Piece> = Vec::new();
        for (number, file) in self.files.iter().enumerate() {
            let mut piece = Piece { file: number, requests: 0..0, tokens: 0 };
            for r in 0..file.rows.requests() {
                piece.tokens += file.rows.request(r).token_ids().len();
                piece.requests.end = r + 1;
                if piece.tokens >= most {
                    pieces
                        .push(std::mem::replace(&mut piece, Piece { file: number, requests: r + 1..r + 1, tokens: 0 }));
                }
            }
            if !piece.requests.is_empty() {
                pieces.push(piece);
            }
        }
        pieces
    }

    /// Checks all requests on `threads` threads.
    pub(super) fn check(
        &mut self,
        phase: Phase,
        left_out: LeftOut,
        threads: usize,
        progress: &dyn Progress,
    ) -> Checked {
        let pieces = self.pieces();
        let occurrences: Vec<AtomicU64> = (0..self.model.vocab_size).map(|_| AtomicU64::new(0)).collect();
        let inputs = &*self;
        let check = |piece: &Piece| {
            let found = inputs.check_piece(piece, phase, left_out, &occurrences);
            progress.advance(piece.tokens as u64);
            found
        };
        let done = in_parallel(&pieces.iter().collect::<Vec<_>>(), threads, check);
        let mut bad = Vec::new();
        for (piece, (fates, records)) in pieces.iter().zip(done) {
            self.files[piece.file].fates.extend(fates);
            bad.extend(records);
        }
        let of = |fate| self.files.iter().flat_map(|file| &file.fates).filter(|other| **other == fate).count();
        let (counted, held_out) = (of(Fate::Counted), of(Fate::HeldOut));
        let occurrences = occurrences.into_iter().map(AtomicU64::into_inner).collect();
        Checked { occurrences, bad, counted, held_out }
    }

    fn check_piece(
        &self,
        piece: &Piece,
        phase: Phase,
        left_out: LeftOut,
        occurrences: &[AtomicU64],
    ) -> (Vec<Fate>, Vec<BadRecord>) {
        let file = &self.files[piece.file];
        let mut rules = file.rows.rules();
        let (mut fates, mut bad) = (Vec::with_capacity(piece.requests.len()), Vec::new());
        for r in piece.requests.clone() {
            fates.push(match file.rows.check(r, &mut rules) {
                Err(error) => {
                    let record = format!("request {r}");
                    bad.push(BadRecord { file: file.path.clone(), record, reason: error.to_string() });
                    Fate::Bad
                }
                Ok(()) if left_out.has(file.rows.request(r)) => Fate::HeldOut,
                Ok(()) => {
                    self.count_tokens(file, r, phase, occurrences);
                    Fate::Counted
                }
            });
        }
        file.rows.release(piece.requests.clone());
        (fates, bad)
    }

    fn count_tokens(&self, file: &InputFile, r: usize, phase: Phase, occurrences: &[AtomicU64]) {
        let [layers, k] = self.model.route_shape();
        let request = file.rows.request(r);
        for position in positions(request, phase) {
            let known = match file.rows.experts(r) {
                ExpertRows::Narrow(ids) => is_known(&ids[position * layers * k..][..layers * k], k, u8::MAX),
                ExpertRows::Wide(ids) => is_known(&ids[position * layers * k..][..layers * k], k, u16::MAX),
            };
            if known {
                occurrences[request.token_ids()[position] as usize].fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Appends all requests with the given fate to a trace, in order.
    pub(super) fn write(&self, fate: Fate, out: &mut TraceWriter) -> Result<(), ProfilerError> {
        for file in &self.files {
            for r in (0..file.rows.requests()).filter(|&r| file.fates[r] == fate) {
                let request = file.rows.request(r);
                let prompt_len = u32::try_from(request.prompt_len()).unwrap_or(u32::MAX);
                out.push_rows(request.token_ids(), prompt_len, file.rows.experts(r))?;
                file.rows.release(r..r + 1);
            }
        }
        Ok(())
    }
}

/// Whether the error means that the file is damaged. A file of another format is the caller's mistake instead.
fn is_damage(error: &FormatError) -> bool {
    match error {
        FormatError::File { source, .. } => is_damage(source),
        FormatError::Io { .. } | FormatError::WrongFormat { .. } | FormatError::UnknownVersion { .. } => false,
        _ => true,
    }
}

/// Estimates the number of requests in a damaged file, assuming that they are as long as those in the other files.
fn requests_in(path: &Path, others: &[InputFile]) -> usize {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len()) as f64;
    let requests: usize = others.iter().map(|other| other.rows.requests()).sum();
    let bytes: f64 = others.iter().map(|other| size(&other.path)).sum();
    ((requests as f64 * size(path) / bytes.max(1.0)).ceil() as usize).max(1)
}

fn bad_file(path: &Path, error: FormatError) -> BadRecord {
    let reason = match error {
        FormatError::File { source, .. } => source.to_string(),
        error => error.to_string(),
    };
    BadRecord { file: path.to_path_buf(), record: "as a whole".into(), reason }
}

/// Whether a route is known in at least one layer.
fn is_known<T: Copy + PartialEq>(row: &[T], k: usize, unknown: T) -> bool {
    row.iter().step_by(k).any(|&first| first != unknown)
}
