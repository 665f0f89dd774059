//! A rolling profile: counts only, in bounded memory and for a bounded time.
//!
//! Counts are stored in two generations. New counts are added to the newer one; when it has half of the allowed entries
//! or has been counting for half of the retention period, it becomes the older one and the previous older one is
//! dropped. Whole generations are dropped because the rows of a profile must remain whole tokens: halved or thinned
//! counts would not be a profile. The written profile is the sum of both.

use semmoe_tables::{FormatError, ModelInfo, Phase, Profile, ProfileBuilder, Provenance, TraceBuilder};

use super::kept::{rfc3339, unix_seconds};
use crate::config::RollingLimits;

/// Prefix of `source` in a written profile; the start of counting follows.
const SOURCE: &str = "sampled requests since ";

/// One model's rolling profile. Times are Unix times in seconds.
pub(crate) struct Rolling {
    model: ModelInfo,
    limits: RollingLimits,
    older: Option<Generation>,
    newer: Generation,
    /// Number of tokens dropped since the last call of [`Rolling::take_dropped`].
    dropped: u64,
}

struct Generation {
    counts: ProfileBuilder,
    tokens: u64,
    began: u64,
}

impl Generation {
    fn new(model: &ModelInfo, began: u64) -> Result<Self, FormatError> {
        let counts = ProfileBuilder::new(model.clone(), provenance("counts"), Phase::All)?;
        Ok(Self { counts, tokens: 0, began })
    }
}

fn provenance(source: &str) -> Provenance {
    Provenance { source: source.to_owned(), created: String::new() }
}

impl Rolling {
    pub(crate) fn new(model: ModelInfo, limits: RollingLimits, now: u64) -> Result<Self, FormatError> {
        let newer = Generation::new(&model, now)?;
        Ok(Self { model, limits, older: None, newer, dropped: 0 })
    }

    /// Adds the tokens of one request: `routes` is [n, L, k], validated here. On an error nothing is added, but an
    /// overflowing count discards the newer generation.
    pub(crate) fn add(&mut self, ids: &[u32], prompt: u32, routes: &[u16], now: u64) -> Result<(), FormatError> {
        self.expire(now)?;
        let mut trace = TraceBuilder::new(self.model.clone(), provenance("one request"))?;
        trace.push(ids, prompt, routes, None)?;
        let trace = trace.finish()?;
        if let Err(error) = self.newer.counts.add_trace(&trace) {
            self.dropped += self.newer.tokens;
            self.newer = Generation::new(&self.model, now)?;
            return Err(error);
        }
        self.newer.tokens += ids.len() as u64;
        if self.newer.counts.entries() >= self.limits.entries / 2 {
            self.rotate(now)?;
        }
        Ok(())
    }

    /// Continues a profile written by an earlier run, unless it is too old or too large; returns whether it did.
    pub(crate) fn adopt(&mut self, written: &Profile, now: u64) -> Result<bool, FormatError> {
        let since = written.provenance().source.strip_prefix(SOURCE);
        let since = since.and_then(|since| humantime::parse_rfc3339(since).ok()).map(unix_seconds);
        let entries: usize = (0..self.model.layers()).map(|l| written.entries((l as u16).into())).sum();
        let Some(began) = since.filter(|began| self.is_kept(*began, now) && entries <= self.limits.entries) else {
            return Ok(false);
        };
        let mut older = Generation::new(&self.model, began)?;
        older.counts.add_profile(written)?;
        older.tokens = written.total_tokens();
        self.older = Some(older);
        Ok(true)
    }

    /// Serializes both generations as a profile file; `None` while there are no counts.
    pub(crate) fn bytes(&mut self, now: u64) -> Result<Option<Vec<u8>>, FormatError> {
        self.expire(now)?;
        if self.tokens() == 0 {
            return Ok(None);
        }
        let began = self.older.as_ref().map_or(self.newer.began, |older| older.began);
        let provenance = Provenance { source: format!("{SOURCE}{}", rfc3339(began)), created: rfc3339(now) };
        let mut sum = ProfileBuilder::new(self.model.clone(), provenance, Phase::All)?;
        for generation in self.older.iter().chain([&self.newer]) {
            sum.add_profile(&Profile::from_bytes(generation.counts.to_bytes()?)?)?;
        }
        sum.to_bytes().map(Some)
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.newer.tokens + self.older.as_ref().map_or(0, |older| older.tokens)
    }

    pub(crate) fn entries(&self) -> usize {
        self.newer.counts.entries() + self.older.as_ref().map_or(0, |older| older.counts.entries())
    }

    /// Returns the number of tokens dropped since the last call.
    pub(crate) fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    fn expire(&mut self, now: u64) -> Result<(), FormatError> {
        if now.saturating_sub(self.newer.began) >= self.limits.retention.as_secs() / 2 {
            self.rotate(now)?;
        }
        if self.older.as_ref().is_some_and(|older| !self.is_kept(older.began, now)) {
            self.drop_older();
        }
        Ok(())
    }

    fn is_kept(&self, began: u64, now: u64) -> bool {
        now.saturating_sub(began) < self.limits.retention.as_secs()
    }

    fn rotate(&mut self, now: u64) -> Result<(), FormatError> {
        let fresh = Generation::new(&self.model, now)?;
        self.drop_older();
        self.older = Some(std::mem::replace(&mut self.newer, fresh));
        Ok(())
    }

    fn drop_older(&mut self) {
        self.dropped += self.older.take().map_or(0, |older| older.tokens);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use semmoe_tables::{LayerIdx, TokenId};

    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn rolling(entries: usize) -> Rolling {
        let model = ModelInfo {
            model: "m".into(),
            tokenizer_sha256: None,
            num_experts: 8,
            top_k: 2,
            vocab_size: 100,
            num_hidden_layers: 2,
            layer_ids: vec![0, 1],
        };
        Rolling::new(model, RollingLimits { entries, retention: Duration::from_secs(1000) }, NOW).unwrap()
    }

    fn profile(rolling: &mut Rolling, now: u64) -> Profile {
        Profile::from_bytes(rolling.bytes(now).unwrap().unwrap()).unwrap()
    }

    #[test]
    fn counts_add_up() {
        let mut rolling = rolling(1000);
        assert_eq!(rolling.bytes(NOW).unwrap(), None);
        for _ in 0..3 {
            rolling.add(&[7, 9], 1, &[0, 1, 2, 3, 4, 5, 6, 7], NOW).unwrap();
        }
        assert_eq!((rolling.tokens(), rolling.entries()), (6, 8));
        let profile = profile(&mut rolling, NOW);
        assert_eq!((profile.phase(), profile.total_tokens()), (Phase::All, 6));
        let row = profile.row(LayerIdx::new(1), TokenId::new(7));
        assert_eq!((row.experts, row.counts), (&[2, 3][..], &[3, 3][..]));
        assert_eq!(profile.provenance().source, "sampled requests since 2027-01-15T08:00:00Z");
        for (ids, prompt, routes) in
            [(&[100][..], 1, &[0, 1, 2, 3][..]), (&[1], 1, &[0, 0, 2, 3]), (&[1], 1, &[0, 8, 2, 3]), (&[1], 1, &[0, 1])]
        {
            assert!(rolling.add(ids, prompt, routes, NOW).is_err(), "{ids:?} {routes:?}");
        }
        assert_eq!(rolling.tokens(), 6);
    }

    #[test]
    fn memory_is_bounded_and_the_newest_stay() {
        let mut rolling = rolling(40);
        for token in 0..100 {
            rolling.add(&[token], 1, &[0, 1, 2, 3], NOW).unwrap();
            assert!(rolling.entries() <= 40, "{}", rolling.entries());
        }
        // A generation is five tokens of four entries; the newer one is empty again.
        assert_eq!((rolling.tokens(), rolling.take_dropped(), rolling.take_dropped()), (5, 95, 0));
        let profile = profile(&mut rolling, NOW);
        assert_eq!((profile.token_count(TokenId::new(94)), profile.token_count(TokenId::new(95))), (0, 1));
    }

    #[test]
    fn counts_are_kept_between_half_of_the_retention_and_all_of_it() {
        let mut rolling = rolling(1000);
        let mut kept = |now: u64, token| {
            rolling.add(&[token], 1, &[0, 1, 2, 3], NOW + now).unwrap();
            let counts = profile(&mut rolling, NOW + now).token_counts().to_vec();
            (0..4).filter(|token| counts[*token] > 0).collect::<Vec<_>>()
        };
        assert_eq!(kept(0, 0), [0]);
        assert_eq!(kept(499, 1), [0, 1]);
        assert_eq!(kept(500, 2), [0, 1, 2]);
        assert_eq!(kept(999, 2), [0, 1, 2]);
        assert_eq!(kept(1000, 3), [2, 3]);
        assert_eq!(rolling.bytes(NOW + 9000).unwrap(), None);
    }

    #[test]
    fn what_was_written_is_taken_over_while_it_is_young_enough() {
        let mut before = rolling(1000);
        before.add(&[7, 9], 1, &[0, 1, 2, 3, 4, 5, 6, 7], NOW).unwrap();
        let written = profile(&mut before, NOW + 400);
        for (now, entries, taken) in [(NOW + 999, 1000, true), (NOW + 1000, 1000, false), (NOW + 1, 7, false)] {
            let mut after = rolling(entries);
            assert_eq!(after.adopt(&written, now).unwrap(), taken, "{now} {entries}");
            assert_eq!(after.tokens(), if taken { 2 } else { 0 });
        }
        let mut after = rolling(1000);
        after.adopt(&written, NOW + 499).unwrap();
        after.add(&[7], 1, &[0, 1, 2, 3], NOW + 499).unwrap();
        assert_eq!(profile(&mut after, NOW + 499).token_count(TokenId::new(7)), 2);
    }
}
