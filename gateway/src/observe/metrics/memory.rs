//! Memory held by requests, and clients disconnected because of it.

use super::labels::{Counter, Family, Gauge, ReasonLabels};

labels!(KindLabels { kind: &'static str });

const ANSWERS: KindLabels = KindLabels { kind: "answers" };

metrics! {
    /// Clones share the counters.
    #[derive(Clone)]
    pub(crate) struct MemoryMetrics {
        held: Family<KindLabels, Gauge>,
            "memory_bytes",
            "Memory held by request bodies, and by responses that clients do not read (128 KiB each), in bytes, at most \
             limits.body_memory_bytes and limits.answer_memory_bytes";
        slow_clients: Family<ReasonLabels, Counter>,
            "slow_clients_closed",
            "Connections and HTTP/2 streams closed because their clients read no data: for timeouts.client_seconds \
             (time), or while others held limits.answer_memory_bytes (memory)";
    }
}

impl MemoryMetrics {
    /// Adds bytes held by responses, if the total stays within the limit.
    pub(crate) fn hold(&self, bytes: usize, limit_bytes: usize) -> bool {
        let held = self.held.get_or_create(&ANSWERS);
        let fits = held.inc_by(signed(bytes)) <= signed(limit_bytes.saturating_sub(bytes));
        drop(held);
        if !fits {
            self.give_back(bytes);
            self.closed("memory");
        }
        fits
    }

    pub(crate) fn give_back(&self, bytes: usize) {
        self.held.get_or_create(&ANSWERS).dec_by(signed(bytes));
    }

    /// Number of bytes held by responses.
    pub(crate) fn held_bytes(&self) -> usize {
        usize::try_from(self.held.get_or_create(&ANSWERS).get()).unwrap_or(0)
    }

    /// Sets the number of bytes held by bodies, which are counted elsewhere.
    pub(crate) fn bodies(&self, bytes: usize) {
        self.held.get_or_create(&KindLabels { kind: "bodies" }).set(signed(bytes));
        drop(self.held.get_or_create(&ANSWERS));
    }

    /// Counts a slow client. `reason`: `time` or `memory`.
    pub(crate) fn closed(&self, reason: &'static str) {
        self.slow_clients.get_or_create(&ReasonLabels { reason }).inc();
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
