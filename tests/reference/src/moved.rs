//! The bytes that each kernel moves, and their cost on a link: a model for predictions, not a measurement.
//!
//! n = tokens, H = width of a row, P = ranks; an element has `bytes_of` bytes. The rows of all tokens are N = n x H
//! elements. Counts cover all ranks together; each read and each write of a byte counts once, wherever the memory is.
//! Parts are assumed to be even.

/// The bytes that a call moves.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Moved {
    /// Bytes of rows read by all ranks together.
    pub read: f64,
    /// Bytes of rows written by all ranks together.
    pub written: f64,
    /// Bytes that one rank receives over its link.
    pub link_in: f64,
    /// Bytes that one rank sends over its link.
    pub link_out: f64,
}

/// A call.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Call {
    /// P
    pub ranks: f64,
    /// n x H x bytes of an element: the rows of all tokens.
    pub rows: f64,
}

impl Call {
    /// A call on `tokens` rows of `hidden` elements of `bytes_of` bytes.
    pub fn new(ranks: usize, tokens: usize, hidden: usize, bytes_of: usize) -> Self {
        Self { ranks: ranks as f64, rows: tokens as f64 * hidden as f64 * bytes_of as f64 }
    }

    /// Bytes of N that one rank moves if it keeps its own part: (P-1)/P N.
    fn others(self) -> f64 {
        self.rows * (self.ranks - 1.0) / self.ranks
    }

    /// `srs`, plain or shuffled: each rank pulls its rows from all parts and writes the sums once.
    pub fn reduce_scatter(self) -> Moved {
        let (rows, link) = (self.rows, self.others());
        Moved { read: self.ranks * rows, written: rows, link_in: link, link_out: link }
    }

    /// `srs_norm`: also the residual, and a second result. The norm's weight, H elements, is left out.
    pub fn reduce_scatter_norm(self) -> Moved {
        let plain = self.reduce_scatter();
        Moved { read: plain.read + self.rows, written: plain.written + self.rows, ..plain }
    }

    /// `sag`, plain or shuffled: each rank reads its rows once and pushes them to all.
    pub fn allgather(self) -> Moved {
        let (rows, link) = (self.rows, self.others());
        Moved { read: rows, written: self.ranks * rows, link_in: link, link_out: link }
    }

    /// `all_reduce`: each rank sums one P-th of all parts and pushes it to all.
    pub fn all_reduce(self) -> Moved {
        let (all, link) = (self.ranks * self.rows, 2.0 * self.others());
        Moved { read: all, written: all, link_in: link, link_out: link }
    }

    /// `shuffle` on every rank: the step that fusion saves.
    pub fn shuffle(self) -> Moved {
        let all = self.ranks * self.rows;
        Moved { read: all, written: all, ..Moved::default() }
    }

    /// `nvls`' reduce-scatter: the switch adds, each rank gets its part. Every part is read by its own rank's memory.
    pub fn reduce_scatter_nvls(self) -> Moved {
        let own = self.rows / self.ranks;
        Moved { link_in: own, link_out: self.rows, ..self.reduce_scatter() }
    }

    /// `nvls`' allgather: the switch copies to all.
    pub fn allgather_nvls(self) -> Moved {
        let own = self.rows / self.ranks;
        Moved { link_in: self.rows, link_out: own, ..self.allgather() }
    }

    /// `dispatch`, where each token goes to `fan_out` of the P ranks on average, its own as likely as any other: its
    /// row, and 4 + 8 k bytes of routing. Reads of ids and weights are left out.
    pub fn dispatch(self, tokens: usize, fan_out: f64, top_k: usize) -> Moved {
        let routing = tokens as f64 * fan_out * (4.0 + 8.0 * top_k as f64);
        let sent = self.rows * fan_out + routing;
        let link = sent / self.ranks * (self.ranks - 1.0) / self.ranks;
        Moved { read: self.rows, written: sent, link_in: link, link_out: link }
    }

    /// `combine`: returns the summed rows to their sources.
    pub fn combine(self, fan_out: f64) -> Moved {
        let sent = self.rows * fan_out;
        let link = sent / self.ranks * (self.ranks - 1.0) / self.ranks;
        Moved { read: sent, written: self.rows, link_in: link, link_out: link }
    }
}

impl Moved {
    /// All bytes, read and written: the traffic of an equivalent device-to-device copy on one GPU that all ranks share.
    pub fn total(&self) -> f64 {
        self.read + self.written
    }

    /// Lower bound in microseconds for ranks with a GPU each: the busier direction of the link, or the memory of one
    /// GPU, whichever takes longer.
    pub fn bound_us(&self, ranks: usize, link_gb_per_s: f64, memory_gb_per_s: f64) -> f64 {
        let link = self.link_in.max(self.link_out) / (link_gb_per_s * 1e3);
        let memory = self.total() / ranks as f64 / (memory_gb_per_s * 1e3);
        link.max(memory)
    }
}

/// The average number of ranks that host a token's `top_k` experts, if experts are drawn uniformly and each rank hosts
/// equally many.
pub fn fan_out(ranks: usize, experts: usize, top_k: usize) -> f64 {
    let here = experts / ranks;
    let miss: f64 = (0..top_k).map(|i| (experts - here).saturating_sub(i) as f64 / (experts - i) as f64).product();
    ranks as f64 * (1.0 - miss)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readmes_figures() {
        // 4,096 x 2,048 bf16 over 8 ranks at 450 GB/s.
        let call = Call::new(8, 4096, 2048, 2);
        assert_eq!(call.rows, 16_777_216.0);
        assert!((call.reduce_scatter().bound_us(8, 450.0, 3350.0) - 32.6).abs() < 0.05);
        assert_eq!(call.reduce_scatter().total(), 9.0 * call.rows);
        // Each GPU sends its whole part, even to a switch that adds.
        assert_eq!(call.reduce_scatter_nvls().link_in, call.rows / 8.0);
        assert_eq!(call.allgather_nvls().link_out, call.rows / 8.0);
    }

    #[test]
    fn one_expert_is_on_one_rank_and_all_are_on_all() {
        assert!((fan_out(8, 64, 1) - 1.0).abs() < 1e-12);
        assert!((fan_out(8, 64, 64) - 8.0).abs() < 1e-12);
        assert!((5.3..5.5).contains(&fan_out(8, 64, 8)), "{}", fan_out(8, 64, 8));
    }
}
