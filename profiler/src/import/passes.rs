//! Converts `per_token` records to requests.
//!
//! A record is a forward pass: the concatenated tokens of several requests. Apart from `extend_seq_lens`, the dump does
//! not state which request a token belongs to. So each prompt chunk and each decoded token becomes a separate request;
//! tokens of different requests are never merged.

use std::collections::{BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use semmoe_tables::{Array, Arrays, FormatError, ModelInfo, TraceBuilder, UNKNOWN_EXPERT};

use crate::ProfilerError;

use super::physical::PhysicalMap;
use super::tally::Tally;
use super::{ContentError, ImportError, integers};

/// SGLang's `ForwardMode`.
mod mode {
    pub(super) const EXTEND: i64 = 1;
    pub(super) const DECODE: i64 = 2;
    pub(super) const MIXED: i64 = 3;
    pub(super) const IDLE: i64 = 4;
}

/// Converts passes and skips repeated ones.
pub(super) struct Passes<'a> {
    model: &'a ModelInfo,
    /// Hashes of pass number and tokens, to drop duplicates: with attention TP every rank records the same passes.
    seen: HashSet<u64>,
}

/// A forward pass, read and validated.
struct Pass {
    tokens: Vec<u32>,
    /// Expert ids [n, L, k].
    experts: Vec<u16>,
    /// For each request, its number of tokens and how many of them are prompt tokens.
    requests: Vec<(usize, u32)>,
    hash: u64,
}

impl<'a> Passes<'a> {
    pub(super) fn new(model: &'a ModelInfo) -> Self {
        Self { model, seen: HashSet::new() }
    }

    /// Adds all records in a dump to a trace.
    pub(super) fn add_file(
        &mut self,
        path: &Path,
        arrays: &Arrays,
        trace: &mut TraceBuilder,
        tally: &mut Tally,
    ) -> Result<(), ProfilerError> {
        let opened = records(arrays).and_then(|records| Ok((records, PhysicalMap::of(arrays, self.model)?)));
        let (records, map) = opened.map_err(ImportError::content(path))?;
        for number in records {
            let reader = Record { model: self.model, arrays, map: &map, number };
            let added = match reader.read() {
                Ok(None) => continue,
                Ok(Some(pass)) if !self.seen.insert(pass.hash) => {
                    tally.repeated += 1;
                    Ok(())
                }
                Ok(Some(pass)) => self.push(trace, &pass).map_err(ContentError::from),
                Err(error) => Err(error),
            };
            tally.count(path, format!("record {number}"), added);
        }
        Ok(())
    }

    /// Adds all requests of a pass or none. The pass was validated, so only the trace format's rules can still fail.
    fn push(&self, trace: &mut TraceBuilder, pass: &Pass) -> Result<(), FormatError> {
        let width = self.model.layers() * usize::from(self.model.top_k);
        trace.check(&pass.tokens, 0, &pass.experts)?;
        let mut from = 0;
        for &(tokens, prompt) in &pass.requests {
            let to = from + tokens;
            trace.push(&pass.tokens[from..to], prompt, &pass.experts[from * width..to * width], None)?;
            from = to;
        }
        Ok(())
    }
}

/// Returns the numbers of a dump's records; fails unless the dump was recorded in `per_token` mode.
fn records(arrays: &Arrays) -> Result<BTreeSet<u64>, ContentError> {
    let named = |name: &str| {
        let (number, field) = name.strip_prefix("records.")?.split_once('.')?;
        Some((number.parse().ok()?, field == "topk_ids_of_layer"))
    };
    let fields: Vec<(u64, bool)> = arrays.names().filter_map(named).collect();
    if fields.is_empty() {
        let expected = "a dump of SGLang's recorder";
        return Err(ContentError::unexpected("it has neither `records` nor `logical_count`", expected));
    }
    // All records in a dump have the same mode.
    if !fields.iter().any(|field| field.1) {
        return Err(ContentError::PerPass);
    }
    Ok(fields.into_iter().map(|field| field.0).collect())
}

/// A record being read.
struct Record<'a> {
    model: &'a ModelInfo,
    arrays: &'a Arrays,
    map: &'a PhysicalMap,
    number: u64,
}

impl Record<'_> {
    /// Reads the pass; `None` if it has no tokens.
    fn read(&self) -> Result<Option<Pass>, ContentError> {
        let number = self.int("forward_pass_id")?;
        let mode = self.int("forward_mode")?;
        let tokens = self.numbers("input_ids")?.ok_or_else(|| missing("input_ids"))?;
        if mode == mode::IDLE || tokens.is_empty() {
            return Ok(None);
        }
        let positions = self.numbers("positions")?.ok_or_else(|| missing("positions"))?;
        if positions.len() != tokens.len() {
            let expected = format!("one for each of {} tokens", tokens.len());
            return Err(ContentError::unexpected(format!("{} positions", positions.len()), expected));
        }
        let requests = requests(mode, &positions, self.numbers("extend_seq_lens")?)?;
        let array = self.array("topk_ids_of_layer")?;
        let experts = self.experts(&array, tokens.len())?;
        self.recount(&array)?;
        let mut hasher = DefaultHasher::new();
        (number, mode, &tokens, &positions).hash(&mut hasher);
        Ok(Some(Pass { tokens, experts, requests, hash: hasher.finish() }))
    }

    /// Reads the logical experts in the MoE layers: [n, L, k].
    fn experts(&self, array: &Array<'_>, tokens: usize) -> Result<Vec<u16>, ContentError> {
        let k = usize::from(self.model.top_k);
        let expected = || format!("[{}, {tokens}, {k} or more]", self.map.depth);
        let width = match array.shape() {
            &[depth, rows, width] if depth == self.map.depth && rows == tokens as u64 && width >= k as u64 => {
                width as usize
            }
            other => return Err(ContentError::shape("`topk_ids_of_layer`", other, expected())),
        };
        let mut experts = Vec::with_capacity(tokens * self.model.layers() * k);
        for token in 0..tokens {
            for (layer, row) in self.map.rows.iter().enumerate() {
                let ids = (0..width).map(|slot| array.int(&[*row, token, slot]).unwrap_or(i64::MAX));
                let ids: Vec<i64> = ids.collect();
                self.route(layer, &ids, k, &mut experts).map_err(|error| ContentError::Route {
                    token,
                    layer: *row,
                    source: Box::new(error),
                })?;
            }
        }
        Ok(experts)
    }

    /// Reads one token's experts in one layer; all -1 means unknown.
    fn route(&self, layer: usize, ids: &[i64], k: usize, experts: &mut Vec<u16>) -> Result<(), ContentError> {
        let known = ids.iter().filter(|id| **id != -1).count();
        if known == 0 {
            experts.extend(std::iter::repeat_n(UNKNOWN_EXPERT, k));
            return Ok(());
        }
        if known != k || ids[..k].contains(&-1) {
            let expected = format!("{k}: another model, or fused shared experts");
            return Err(ContentError::unexpected(format!("{known} experts"), expected));
        }
        for id in &ids[..k] {
            let expected = || format!("one below {}", self.map.slots);
            let wrong = || ContentError::unexpected(format!("physical expert {id}"), expected());
            experts.push(self.map.logical(layer, *id).ok_or_else(wrong)?);
        }
        Ok(())
    }

    /// Compares the routes with `global_physical_count`, which the recorder computed from the same routes.
    fn recount(&self, array: &Array<'_>) -> Result<(), ContentError> {
        let Some(counted) = self.find("global_physical_count")? else { return Ok(()) };
        let (slots, shape) = (self.map.slots, array.shape());
        if counted.shape() != [self.map.depth, slots] {
            let expected = format!("[{}, {slots}]", self.map.depth);
            return Err(ContentError::shape("`global_physical_count`", counted.shape(), expected));
        }
        for row in &self.map.rows {
            let mut counts = vec![0i64; slots as usize];
            for (token, slot) in
                (0..shape[1] as usize).flat_map(|token| (0..shape[2] as usize).map(move |slot| (token, slot)))
            {
                let id = array.int(&[*row, token, slot]).and_then(|id| usize::try_from(id).ok());
                if let Some(count) = id.and_then(|id| counts.get_mut(id)) {
                    *count += 1;
                }
            }
            let differs = (0..slots as usize).find(|slot| counted.int(&[*row, *slot]) != Some(counts[*slot]));
            if let Some(slot) = differs {
                return Err(ContentError::OtherCount { layer: *row, slot, times: counts[slot] });
            }
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Result<Option<Array<'_>>, ContentError> {
        integers(self.arrays, &format!("records.{}.{name}", self.number))
    }

    fn array(&self, name: &str) -> Result<Array<'_>, ContentError> {
        self.find(name)?.ok_or_else(|| missing(name))
    }

    fn int(&self, name: &str) -> Result<i64, ContentError> {
        let array = self.array(name)?;
        let number = if array.shape().is_empty() { array.int(&[]) } else { None };
        number.ok_or_else(|| ContentError::shape(&format!("`{name}`"), array.shape(), "one integer"))
    }

    /// Reads a list of 32-bit numbers; `None` if absent.
    fn numbers(&self, name: &str) -> Result<Option<Vec<u32>>, ContentError> {
        let Some(array) = self.find(name)? else { return Ok(None) };
        let &[_] = array.shape() else {
            return Err(ContentError::shape(&format!("`{name}`"), array.shape(), "a list"));
        };
        let number = |(at, number): (usize, Option<i64>)| {
            let number = number.unwrap_or(i64::MAX);
            let wrong = || ContentError::unexpected(format!("`{name}` contains {number} at {at}"), "32 bits");
            u32::try_from(number).map_err(|_| wrong())
        };
        array.ints().enumerate().map(number).collect::<Result<_, _>>().map(Some)
    }
}

fn missing(name: &str) -> ContentError {
    ContentError::Missing(format!("`{name}`"))
}

/// Splits a pass into requests: the number of tokens of each, and how many of them are prompt tokens.
fn requests(mode: i64, positions: &[u32], lens: Option<Vec<u32>>) -> Result<Vec<(usize, u32)>, ContentError> {
    match (mode, lens) {
        (mode::DECODE, _) => Ok(vec![(1, 0); positions.len()]),
        (mode::EXTEND | mode::MIXED, Some(lens)) => {
            let total: u64 = lens.iter().map(|length| u64::from(*length)).sum();
            if total != positions.len() as u64 {
                let expected = format!("the {} tokens", positions.len());
                return Err(ContentError::unexpected(format!("`extend_seq_lens` add up to {total}"), expected));
            }
            let mut from = 0;
            let mut requests = Vec::with_capacity(lens.len());
            for length in lens.into_iter().filter(|length| *length > 0) {
                let piece = &positions[from..from + length as usize];
                if piece.windows(2).any(|pair| pair[0].checked_add(1) != Some(pair[1])) {
                    let found = format!("positions do not increase by one from token {from}");
                    return Err(ContentError::unexpected(found, "those of one request"));
                }
                // In a mixed pass, decoded tokens are chunks of length one that do not start a request.
                let decoded = mode == mode::MIXED && length == 1 && piece[0] > 0;
                requests.push((piece.len(), if decoded { 0 } else { length }));
                from += piece.len();
            }
            Ok(requests)
        }
        (mode::EXTEND | mode::MIXED, None) => Err(missing("extend_seq_lens")),
        (other, _) => Err(ContentError::unexpected(
            format!("forward mode {other}"),
            "extend, decode, mixed or idle (1 to 4): speculative decoding is not supported",
        )),
    }
}
