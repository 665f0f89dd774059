//! Data links on a separate network, and the sums of a unit's times.

use std::net::Ipv4Addr;

use crate::support::{Unit, greedy};
use semmoe_tables::Attention;
use semmoe_worker::TransportChoice;
use serde_json::json;

/// Established connections in this process's network namespace whose local end is at `address`.
#[cfg(target_os = "linux")]
fn connections_at(address: Ipv4Addr) -> usize {
    const ESTABLISHED: &str = "01";
    let local = format!("{:08X}:", u32::from_le_bytes(address.octets()));
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let fields = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields.filter(|fields| fields[1].starts_with(&local) && fields[3] == ESTABLISHED).count()
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn data_links_are_where_the_ranks_say() {
    // All of 127/8 is this machine; each rank listens on an address that no other test uses.
    let of = |rank: u16| Ipv4Addr::new(127, 83, 119, 1 + rank as u8);
    let unit = Unit::start_with(4, |config| {
        config.data_address = Some(of(config.rank).into());
        config.transport = TransportChoice::Tcp;
    });
    unit.ok("/generate", &greedy(&json!([557, 1712, 298]), 2)).await;
    // Rank r accepts the links of the higher ranks.
    assert_eq!([0, 1, 2, 3].map(|rank| connections_at(of(rank))), [3, 2, 1, 0]);
    unit.end();
}

/// Scatter and gather occur only with attention tp, and outside the MoE layers' own time.
#[tokio::test(flavor = "multi_thread")]
async fn collectives_are_part_of_layers_and_layers_of_steps() {
    for attention in [Attention::Dp, Attention::Tp] {
        times_of_a_unit(attention).await;
    }
}

async fn times_of_a_unit(attention: Attention) {
    let unit = Unit::start_with(2, |config| config.attention = attention);
    unit.ok("/generate", &greedy(&json!([557, 1712, 298]), 4)).await;
    unit.quiet().await;
    let page = unit.metrics().await.0;
    let seconds = |family: &str, rank: usize, kind: &str| -> f64 {
        let rank = format!("rank=\"{rank}\"");
        let lines = page.lines().filter(|line| line.starts_with(family) && line.contains(&rank) && line.contains(kind));
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
    };
    for rank in [0, 1] {
        let step = seconds("semmoe_step_seconds_total", rank, "");
        let moe = seconds("semmoe_moe_seconds_total", rank, "");
        let collective = |kind: &str| seconds("semmoe_collective_seconds_total", rank, &format!("kind=\"{kind}\""));
        let [dispatch, combine, scatter, gather] = ["dispatch", "combine", "scatter", "gather"].map(collective);
        assert!(dispatch > 0.0 && combine > 0.0, "{page}");
        assert!(dispatch + combine <= moe && moe + scatter + gather <= step, "{page}");
        let is_tp = attention == Attention::Tp;
        assert!((scatter > 0.0) == is_tp && (gather > 0.0) == is_tp, "{page}");
        // A prompt and three tokens after the first, on every rank.
        assert!(seconds("semmoe_steps_total", rank, "") >= 4.0, "{page}");
    }
    unit.stop(0);
}

/// Two ranks on each of two simulated hosts: rows within a host use shared memory, and tokens are equal.
#[tokio::test(flavor = "multi_thread")]
async fn ranks_of_a_host_share_memory_among_others() {
    let body = greedy(&json!([557, 1712, 298, 4, 77]), 8);
    for attention in [Attention::Dp, Attention::Tp] {
        let mut answers = Vec::new();
        for (places, transport) in [([0, 0, 0, 0], "shm"), ([0, 1, 1, 0], "mixed"), ([0, 1, 2, 3], "tcp")] {
            let unit = Unit::start_with(4, |config| {
                config.attention = attention;
                config.place = Some(format!("host {}", places[usize::from(config.rank)]));
            });
            assert_eq!(unit.get("/server_info").await["transport"], transport);
            answers.push(unit.ok("/generate", &body).await["output_ids"].clone());
            unit.end();
        }
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    }
}
