//! Merges profiles of any size, row by row. The result does not depend on the order or grouping of the inputs or on the
//! number of threads.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use semmoe_tables::{
    FormatError, LayerIdx, ModelInfo, Phase, Profile, ProfileRow, ProfileWriter, TokenId, in_parallel,
};

use crate::ProfilerError;
use crate::build::{BuildReport, DomainInput, refuse_domains, weigh};
use crate::error::check;
use crate::origin::Origin;

/// Approximate size of the block that a thread merges at once.
const BLOCK_BYTES: usize = 8 << 20;

/// Options of a merge.
#[derive(Clone, Debug)]
pub struct MergeOptions {
    /// Profiles of one model and phase.
    pub profiles: Vec<DomainInput>,
    /// The profile to write.
    pub out: PathBuf,
    /// Number of threads, at least 1.
    pub threads: usize,
    /// Give all domains equal weight. This must be the last step: shards of a domain are merged in the same run or
    /// before.
    pub weight_by_domain: bool,
}

impl MergeOptions {
    /// Default options: no weighting, two threads.
    pub fn new(profiles: Vec<DomainInput>, out: PathBuf) -> Self {
        MergeOptions { profiles, out, threads: 2, weight_by_domain: false }
    }
}

/// Merges profiles of one model and phase.
///
/// # Errors
/// If a profile cannot be read or is of another model or phase, a count overflows, or a write fails. Nothing is written
/// in these cases.
pub fn merge(options: &MergeOptions) -> Result<BuildReport, ProfilerError> {
    check(options.threads > 0, "threads", 0, "at least 1")?;
    if !options.weight_by_domain {
        refuse_domains(&options.profiles)?;
    }
    let mut origin = Origin::default();
    let (model, phase, profiles) = open(&options.profiles, &mut origin)?;
    let mut domains = Vec::new();
    if options.weight_by_domain {
        let mut tokens = BTreeMap::new();
        for (input, profile) in options.profiles.iter().zip(&profiles) {
            *tokens.entry(input.name()).or_insert(0u64) += profile.total_tokens();
        }
        domains = weigh(&tokens)?;
        let weights: Vec<String> = domains.iter().map(|d| format!("{} x{}", d.domain, d.multiplier)).collect();
        origin.add_source(&format!("weighted by domain: {}", weights.join(", ")));
    }
    let weighted = |(input, profile): (&DomainInput, Profile)| {
        let domain = domains.iter().find(|domain| domain.domain == input.name());
        Weighted { profile, multiplier: domain.map_or(1, |domain| domain.multiplier) }
    };
    let inputs: Vec<Weighted> = options.profiles.iter().zip(profiles).map(weighted).collect();
    let token_count = token_counts(&inputs, model.vocab_size)?;
    let tokens = token_count.iter().fold(0, |sum: u64, &n| sum.saturating_add(n));
    let mut writer = ProfileWriter::create(&options.out, model.clone(), origin.provenance(), phase, token_count)?;
    let merging = Merging { inputs: &inputs, model: &model, threads: options.threads };
    for layer in 0..model.layers() {
        merging.layer(LayerIdx::new(layer as u16), &mut writer)?;
        inputs.iter().for_each(|input| input.profile.release());
    }
    Ok(BuildReport {
        out: options.out.clone(),
        digest: writer.finish()?,
        model,
        inputs: inputs.len(),
        tokens,
        requests: 0,
        held_out: 0,
        passes: 1,
        domains,
        bad: Vec::new(),
    })
}

fn open(paths: &[DomainInput], origin: &mut Origin) -> Result<(ModelInfo, Phase, Vec<Profile>), ProfilerError> {
    let mut profiles: Vec<Profile> = Vec::with_capacity(paths.len());
    let mut first: Option<(ModelInfo, Phase)> = None;
    for DomainInput { path, .. } in paths {
        let profile = Profile::open(path)?;
        match &mut first {
            Some((model, phase)) => {
                model.adopt(profile.model()).map_err(|error| error.in_file(path))?;
                if profile.phase() != *phase {
                    let mismatch = FormatError::PhaseMismatch { found: profile.phase(), expected: *phase };
                    return Err(mismatch.in_file(path).into());
                }
            }
            None => first = Some((profile.model().clone(), profile.phase())),
        }
        origin.add(profile.provenance());
        profiles.push(profile);
    }
    let (model, phase) = first.ok_or(ProfilerError::NoInput("profile"))?;
    Ok((model, phase, profiles))
}

struct Weighted {
    profile: Profile,
    multiplier: u32,
}

fn token_counts(inputs: &[Weighted], vocab_size: u32) -> Result<Vec<u64>, ProfilerError> {
    let mut sums = vec![0u64; vocab_size as usize];
    for Weighted { profile, multiplier } in inputs {
        for (token, (sum, &count)) in sums.iter_mut().zip(profile.token_counts()).enumerate() {
            let weighted = count.checked_mul(u64::from(*multiplier)).and_then(|count| sum.checked_add(count));
            let overflow = || FormatError::CountOverflow { what: format!("token {token}"), bits: 64 };
            *sum = weighted.ok_or_else(overflow)?;
        }
    }
    Ok(sums)
}

struct Merging<'a> {
    inputs: &'a [Weighted],
    model: &'a ModelInfo,
    threads: usize,
}

/// Rows of a range of tokens in one layer.
#[derive(Default)]
struct Block {
    /// Token id and end of its row.
    rows: Vec<(u32, usize)>,
    experts: Vec<u16>,
    counts: Vec<u32>,
}

impl Merging<'_> {
    /// Merges one block of tokens per thread in parallel, and writes the blocks in order.
    fn layer(&self, layer: LayerIdx, writer: &mut ProfileWriter) -> Result<(), ProfilerError> {
        let row_bytes = usize::from(self.model.num_experts) * (size_of::<u16>() + size_of::<u32>());
        let step = (BLOCK_BYTES / row_bytes).max(1) as u32;
        let vocabulary = self.model.vocab_size;
        let starts: Vec<u32> = (0..vocabulary).step_by(step as usize).collect();
        for window in starts.chunks(self.threads) {
            let merge = |start: u32| self.block(layer, start..start.saturating_add(step).min(vocabulary));
            for block in in_parallel(window, self.threads, merge) {
                let block = block?;
                let mut start = 0;
                for (token, end) in block.rows {
                    let row = ProfileRow { experts: &block.experts[start..end], counts: &block.counts[start..end] };
                    writer.push(layer, TokenId::new(token), row)?;
                    start = end;
                }
            }
        }
        Ok(())
    }

    fn block(&self, layer: LayerIdx, tokens: Range<u32>) -> Result<Block, FormatError> {
        let mut block = Block::default();
        let mut sums = vec![0u64; usize::from(self.model.num_experts)];
        let mut touched: Vec<u16> = Vec::new();
        for token in tokens {
            for Weighted { profile, multiplier } in self.inputs {
                for (expert, count) in profile.row(layer, TokenId::new(token)).iter() {
                    let sum = &mut sums[usize::from(expert)];
                    if *sum == 0 {
                        touched.push(expert);
                    }
                    // The product cannot overflow, as both factors are below 2^32. Sums above 32 bits are rejected
                    // below.
                    *sum = sum.saturating_add(u64::from(count) * u64::from(*multiplier));
                }
            }
            touched.sort_unstable();
            for expert in touched.drain(..) {
                let sum = std::mem::take(&mut sums[usize::from(expert)]);
                let what = || format!("expert {expert} in layer {} for token {token}", layer.index());
                let count = u32::try_from(sum).map_err(|_| FormatError::CountOverflow { what: what(), bits: 32 })?;
                block.experts.push(expert);
                block.counts.push(count);
            }
            if block.rows.last().map_or(0, |(_, end)| *end) < block.experts.len() {
                block.rows.push((token, block.experts.len()));
            }
        }
        Ok(block)
    }
}
