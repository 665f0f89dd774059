//! The stream model, and its consequences.

use semmoe_planner::hybridep::{HybridLevel, Stream, Use, best_domains};

use crate::Outcome;
use crate::papers::Verdict::{Corrected, NeedsGpu, Refuted};
use crate::papers::{Found, Verdict, axis, line, lines, near};

/// V-A: PCIe inside a centre, Ethernet between centres, of a node of 8 GPUs; bytes per second of a GPU.
const PCIE: f64 = 16e9;
const ETHERNET: f64 = 1.25e9 / 8.0;
const MB: f64 = 1e6;

/// The closed form of the best p (equations 11 and 12).
fn closed(stream: &Stream) -> f64 {
    if 2.0 * stream.data_bytes >= stream.workers as f64 * stream.expert_bytes { 0.0 } else { printed(stream) }
}

fn printed(stream: &Stream) -> f64 {
    let others = stream.workers as f64 - 1.0;
    1.0 - stream.bytes_per_second * stream.before_experts / (stream.expert_bytes * others)
}

/// Streams of 8 to 32 workers over a wide range of sizes, rates and times.
fn streams() -> impl Iterator<Item = Stream> {
    let mut random = fastrand::Rng::with_seed(1);
    (0..2000).map(move |_| {
        let mut between = |low: f64, high: f64| low * (high / low).powf(random.f64());
        Stream {
            bytes_per_second: between(1e8, 1e11),
            before_experts: between(1e-5, 1e-2),
            data_bytes: between(1e5, 1e9),
            expert_bytes: between(1e4, 1e8),
            workers: 8 << random.u32(0..3),
        }
    })
}

pub(super) fn figure_6() -> Outcome<Found> {
    let (mut right, mut cut, mut all) = (0, 0, 0);
    for stream in streams() {
        let least = (0..=1000).map(|at| stream.seconds(f64::from(at) / 1000.0)).fold(f64::INFINITY, f64::min);
        let best = closed(&stream);
        all += 1;
        cut += usize::from(best < 0.0);
        // No p of a grid beats the closed form.
        right += usize::from(stream.seconds(best.max(0.0)) <= least * (1.0 + 1e-9));
    }
    let shape = |expert_bytes| Stream {
        workers: 8,
        bytes_per_second: PCIE,
        before_experts: 0.49e-3,
        data_bytes: 8.0 * MB,
        expert_bytes,
    };
    let curve = |expert: f64| {
        (0..=50).map(|at| f64::from(at) / 50.0).map(|p| (p, 1e3 * shape(expert * MB).seconds(p))).collect()
    };
    let panel = lines(
        "HybridEP, figure 6: 8 GPUs, 8 MB of data, 128 Gbit/s",
        [axis("p, share that travels as data", false), axis("ms a layer", false)],
        vec![line("experts of 4.7 MB: 2D < G P_E", curve(4.7)), line("experts of 1 MB: 2D >= G P_E", curve(1.0))],
    );
    let ours = format!("{right} of {all} drawn cases against all p; in {cut} the printed share is below 0");
    Ok(Found::new(Verdict::of(right == all, Refuted), ours).with_picture("hybridep-figure-6", panel))
}

/// Table IV: p, Lat_PE in ms, D and P_E in MB; G = 8, B = 128 Gbit/s.
const TABLE_4: [[f64; 4]; 4] =
    [[0.75, 0.049, 8.0, 4.7], [0.5, 0.049, 8.0, 2.35], [0.0, 0.099, 3.0, 0.094], [0.0, 0.099, 3.0, 0.047]];

pub(super) fn table_4() -> Outcome<Found> {
    let best = |times: f64| {
        TABLE_4.map(|[_, before, data, expert]| {
            let stream = Stream {
                workers: 8,
                bytes_per_second: PCIE,
                before_experts: before * times * 1e-3,
                data_bytes: data * MB,
                expert_bytes: expert * MB,
            };
            closed(&stream).max(0.0)
        })
    };
    let matches = |found: [f64; 4]| found.iter().zip(TABLE_4).all(|(found, row)| (found - row[0]).abs() < 0.03);
    let (as_printed, times_ten) = (best(1.0), best(10.0));
    let verdict = match (matches(as_printed), matches(times_ten)) {
        (true, _) => Verdict::Reproduced,
        (false, true) => Corrected,
        (false, false) => Refuted,
    };
    let shown = |found: [f64; 4]| found.map(|p| format!("{p:.3}")).join(", ");
    Ok(Found::new(verdict, format!("{}; with ten times Lat_PE {}", shown(as_printed), shown(times_ten))))
}

/// Gain of domains over EP on 2 or 4 centres of 8 GPUs without computation.
fn gain(centres: u64, data: f64, expert: f64) -> Outcome<f64> {
    let levels = [
        HybridLevel { workers: centres, bytes_per_second: ETHERNET },
        HybridLevel { workers: 8, bytes_per_second: PCIE },
    ];
    let stream = Stream {
        workers: 8 * centres,
        bytes_per_second: ETHERNET,
        before_experts: 0.0,
        data_bytes: data * MB,
        expert_bytes: expert * MB,
    };
    let best = best_domains(&stream, &levels, Use::Streamed)?;
    Ok(best.ep_seconds / best.seconds)
}

pub(super) fn figure_13() -> Outcome<Found> {
    let mut gains = Vec::new();
    for centres in [2, 4] {
        gains.push([32.0, 8.0, 2.0].map(|expert| gain(centres, 16.0, expert)));
    }
    let mut shown = Vec::new();
    for of in gains {
        let [large, middle, small] = of;
        shown.push(format!("{:.1}, {:.1}, {:.1}", large?, middle?, small?));
    }
    Ok(Found::new(
        NeedsGpu,
        format!("model of the exchange alone, 32, 8, 2 MB: {} times on 2 centres, {} on 4", shown[0], shown[1]),
    ))
}

/// Table V: seconds of an iteration by data size, three other systems and HybridEP, clusters M and L.
const TABLE_5: [[[f64; 6]; 4]; 2] = [
    [
        [2.52, 4.26, 5.82, 7.62, 12.65, 20.35],
        [2.58, 4.37, 5.90, 7.81, 12.80, 20.82],
        [2.59, 4.34, 5.97, 7.80, 12.68, 20.91],
        [2.48, 2.63, 2.74, 2.82, 3.01, 3.78],
    ],
    [
        [3.74, 7.30, 10.69, 13.54, 18.59, 28.46],
        [3.86, 7.50, 11.09, 13.88, 19.32, 29.43],
        [3.82, 7.46, 10.94, 14.08, 19.25, 29.53],
        [3.49, 3.53, 3.54, 3.85, 4.24, 5.20],
    ],
];
/// Its last row.
const TABLE_5_GAINS: [[f64; 6]; 2] = [[1.03, 1.64, 2.15, 2.75, 4.22, 5.47], [1.09, 2.10, 3.08, 3.59, 4.49, 5.60]];

pub(super) fn table_5() -> Outcome<Found> {
    let mut wrong = 0;
    for (times, printed) in TABLE_5.iter().zip(TABLE_5_GAINS) {
        for (at, printed) in printed.iter().enumerate() {
            let mean = times[..3].iter().map(|row| row[at]).sum::<f64>() / 3.0;
            wrong += usize::from(!near(mean / times[3][at], *printed, 0.01));
        }
    }
    let bound = gain(2, 6.0, 0.36)?;
    Ok(Found::new(
        NeedsGpu,
        format!(
            "{wrong} of 12 printed ratios do not follow from its times; model of the exchange alone {bound:.0} times at 6 MB already"
        ),
    ))
}

/// Table VI: seconds with domains alone and with smaller experts, two sizes on three clusters.
const TABLE_6: [[f64; 2]; 6] = [[0.76, 0.61], [3.41, 2.54], [6.12, 3.48], [1.06, 0.74], [6.21, 2.81], [10.89, 3.86]];

pub(super) fn table_6() -> Outcome<Found> {
    let ratios = TABLE_6.map(|[domains, migrated]| domains / migrated);
    let (least, most) =
        ratios.iter().fold((f64::INFINITY, 0.0f64), |(least, most), ratio| (least.min(*ratio), most.max(*ratio)));
    // 48 and 2 MB: p = 0 on all clusters.
    let all_gather = [8.0, 16.0, 32.0].iter().all(|workers| 2.0 * 48.0 >= workers * 2.0);
    let p = if all_gather { "p = 0 follows for 48 and 2 MB" } else { "p = 0 does not follow" };
    Ok(Found::new(NeedsGpu, format!("its times give {least:.2} to {most:.2}; {p}")))
}

pub(super) fn figure_16() -> Outcome<Found> {
    let traffic = |tokens: f64, size: u64| {
        // 32 workers; H 1024, M 2048, bf16 (Table III); experts compressed 50 times (V-E).
        let stream = Stream {
            workers: 32,
            bytes_per_second: PCIE,
            before_experts: 0.0,
            data_bytes: tokens * 1024.0 * 2.0,
            expert_bytes: 2.0 * 1024.0 * 2048.0 * 2.0 / 50.0,
        };
        stream.traffic(size).iter().sum::<f64>() / MB
    };
    let tokens: Vec<f64> = (6..=16).map(|power| f64::from(1 << power)).collect();
    let curve = |size| tokens.iter().map(|&tokens| (tokens, traffic(tokens, size))).collect();
    let panel = lines(
        "HybridEP, figure 16: MB into a GPU, 32 GPUs, H 1024, M 2048",
        [axis("tokens of a GPU", true), axis("MB a layer", true)],
        vec![line("EP", curve(1)), line("domains of 8", curve(8)), line("one domain", curve(32))],
    );
    let bounded = traffic(1e6, 32) == traffic(64.0, 32);
    let linear = near(traffic(1e6, 1) / traffic(1e5, 1), 10.0, 1e-9);
    let even = traffic(0.0, 32) / traffic(1.0, 1);
    let ours = format!("one domain {:.1} MB whatever the tokens, EP as much at {even:.0} tokens", traffic(0.0, 32));
    Ok(Found::new(Verdict::of(bounded && linear, Refuted), ours).with_picture("hybridep-figure-16", panel))
}

/// How many times as fast as EP a layer is over `workers` centres with domains of `size`.
fn speedup(stream: &Stream, size: f64) -> f64 {
    let workers = stream.workers as f64;
    stream.seconds(1.0) / stream.seconds((workers - size) / (workers - 1.0))
}

pub(super) fn figure_17() -> Outcome<Found> {
    const CENTRES: u64 = 1000;
    let sized = |stream: &Stream, workers: u64| Stream { workers, ..*stream };
    let (mut falls, mut grows, mut all) = (0, 0.0f64, 0);
    for stream in streams() {
        let [few, many] = [sized(&stream, 100), sized(&stream, CENTRES)];
        all += 1;
        falls += usize::from(speedup(&many, 10.0) <= speedup(&few, 10.0).max(1.0) * 1.001);
        // p = 0.5 at both sizes.
        let half = |stream: &Stream| stream.seconds(1.0) / stream.seconds(0.5);
        grows = grows.max(half(&many) / half(&few));
    }
    // The largest saving that a domain of S can give: (G - 1) / (G - S).
    let needed = CENTRES as f64 - (CENTRES as f64 - 1.0) / 1.45;
    let ours = format!(
        "drawn cases, 100 to 1000 centres: with one size it falls in {falls} of {all}, with one share it grows by {:.1}% at most; 1.45 needs domains of {needed:.0}",
        (grows - 1.0) * 1e2
    );
    let holds = falls == all && grows > 1.2;
    let example = Stream {
        workers: CENTRES,
        bytes_per_second: 1.25e9,
        before_experts: 0.49e-3,
        data_bytes: 24.0 * MB,
        expert_bytes: 0.16 * MB,
    };
    let counts = [50u64, 100, 200, 500, 1000];
    let curve =
        |of: &dyn Fn(&Stream) -> f64| counts.iter().map(|&count| (count as f64, of(&sized(&example, count)))).collect();
    let panel = lines(
        "HybridEP, figure 17: 24 MB of data, experts of 0.16 MB, 10 Gbit/s",
        [axis("centres", true), axis("times EP's speed", false)],
        vec![
            line("domains of 10", curve(&|stream| speedup(stream, 10.0))),
            line("p = 0.5", curve(&|stream| stream.seconds(1.0) / stream.seconds(0.5))),
        ],
    );
    Ok(Found::new(Verdict::of(holds, Corrected), ours).with_picture("hybridep-figure-17", panel))
}
