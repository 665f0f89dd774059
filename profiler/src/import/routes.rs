//! Reads arrays of routes: `token_ids` [n], `experts` [n, L, k], and optionally `request_offsets` [R + 1] and
//! `prompt_lengths` [R], as in a trace, with integers of any width. An unknown route is -1, or the maximum unsigned
//! 8-bit or 16-bit value, in all k slots.

use std::path::Path;

use semmoe_tables::{Array, Arrays, ModelInfo, TraceBuilder, UNKNOWN_EXPERT};

use crate::ProfilerError;

use super::tally::Tally;
use super::{ContentError, ImportError, integers, layer_rows, open};

const NAMES: [&str; 4] = ["token_ids", "experts", "request_offsets", "prompt_lengths"];

/// Adds all requests in a file to a trace.
pub(super) fn add_file(path: &Path, trace: &mut TraceBuilder, tally: &mut Tally) -> Result<(), ProfilerError> {
    let arrays = open(path)?;
    let routes = Routes::of(&arrays, trace.model()).map_err(ImportError::content(path))?;
    for request in 0..routes.offsets.len() - 1 {
        let pushed = routes
            .request(request)
            .and_then(|(tokens, prompt, experts)| Ok(trace.push(&tokens, prompt, &experts, None)?));
        tally.count(path, format!("request {request}"), pushed);
    }
    Ok(())
}

struct Routes<'a> {
    token_ids: Array<'a>,
    experts: Array<'a>,
    prompt_lengths: Option<Array<'a>>,
    offsets: Vec<usize>,
    /// The array's row for each MoE layer.
    rows: Vec<usize>,
    k: usize,
    unknown: i64,
}

impl<'a> Routes<'a> {
    fn of(arrays: &'a Arrays, model: &ModelInfo) -> Result<Self, ContentError> {
        if let Some(other) = arrays.names().find(|name| !NAMES.contains(name)) {
            let other: String = other.escape_debug().take(60).collect();
            return Err(ContentError::unexpected(format!("the array `{other}` is not known"), NAMES.join(", ")));
        }
        let needed = |name: &str| {
            let found = integers(arrays, name)?;
            let missing = || format!("array `{name}`: a profile requires tokens and their experts");
            found.ok_or_else(|| ContentError::Missing(missing()))
        };
        let (token_ids, experts) = (needed("token_ids")?, needed("experts")?);
        let &[n] = token_ids.shape() else {
            return Err(ContentError::shape("`token_ids`", token_ids.shape(), "[n]"));
        };
        let k = model.top_k;
        let rows = match experts.shape() {
            &[rows, layers, width] if rows == n && width == u64::from(k) => layer_rows("`experts` has", model, layers)?,
            other => return Err(ContentError::shape("`experts`", other, format!("[{n}, layers, {k}]"))),
        };
        let offsets = match integers(arrays, "request_offsets")? {
            Some(array) => offsets(&array, n as usize)?,
            None => vec![0, n as usize],
        };
        let prompt_lengths = integers(arrays, "prompt_lengths")?;
        if let Some(lengths) = &prompt_lengths
            && lengths.shape() != [offsets.len() as u64 - 1]
        {
            let expected = format!("[{}]", offsets.len() - 1);
            return Err(ContentError::shape("`prompt_lengths`", lengths.shape(), expected));
        }
        let unknown = match experts.dtype() {
            "U8" => u8::MAX.into(),
            "U16" => u16::MAX.into(),
            _ => -1,
        };
        Ok(Self { token_ids, experts, prompt_lengths, offsets, rows, k: k.into(), unknown })
    }

    /// Returns a request's tokens, prompt length and experts.
    fn request(&self, request: usize) -> Result<(Vec<u32>, u32, Vec<u16>), ContentError> {
        let (from, to) = (self.offsets[request], self.offsets[request + 1]);
        let token = |at: usize| {
            let found = self.token_ids.int(&[at]).unwrap_or(i64::MAX);
            let wrong = || ContentError::unexpected(format!("token {}: the id {found}", at - from), "32 bits");
            u32::try_from(found).map_err(|_| wrong())
        };
        let tokens: Vec<u32> = (from..to).map(token).collect::<Result<_, _>>()?;
        let length = self.prompt_lengths.as_ref().map_or(Some((to - from) as i64), |lengths| lengths.int(&[request]));
        let length = length.unwrap_or(i64::MAX);
        let wrong = || ContentError::unexpected(format!("a prompt of {length} tokens"), "32 bits");
        let prompt = u32::try_from(length).map_err(|_| wrong())?;
        let mut experts = Vec::with_capacity((to - from) * self.rows.len() * self.k);
        for (at, row, slot) in (from..to)
            .flat_map(|at| self.rows.iter().flat_map(move |row| (0..self.k).map(move |slot| (at, *row, slot))))
        {
            let found = self.experts.int(&[at, row, slot]).unwrap_or(i64::MAX);
            // Ids that do not fit in 16 bits become an id that the trace rejects with its position.
            experts.push(if found == self.unknown {
                UNKNOWN_EXPERT
            } else {
                u16::try_from(found).unwrap_or(UNKNOWN_EXPERT - 1)
            });
        }
        Ok((tokens, prompt, experts))
    }
}

fn offsets(array: &Array<'_>, tokens: usize) -> Result<Vec<usize>, ContentError> {
    let found = || format!("`request_offsets` of shape {:?}", array.shape());
    let wrong = || ContentError::unexpected(found(), format!("offsets that increase from 0 to {tokens}"));
    let &[_] = array.shape() else { return Err(wrong()) };
    let offsets: Option<Vec<usize>> = array.ints().map(|offset| usize::try_from(offset?).ok()).collect();
    let rises = |offsets: &Vec<usize>| {
        offsets.first() == Some(&0)
            && offsets.last() == Some(&tokens)
            && offsets.windows(2).all(|pair| pair[0] <= pair[1])
    };
    offsets.filter(rises).ok_or_else(wrong)
}
