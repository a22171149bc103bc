//! What others have measured on machines of theirs, predicted from the rate of their links and the time of their computation alone.
//!
//! What else is assumed stands here, and was not fitted to these figures.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use comm_core::{Algorithm, OpKind};
use predict::network::{Costs, Link, Network, Processors};
use predict::trace::{Collective, RankTrace, Trace, Work};
use predict::{Detail, simulate};

/// NCCL's own constant for a step of a ring over a network, by the protocol of long messages (`src/graph/tuning.cc`).
const NCCL_STEP_S: f64 = 14e-6;

/// Between two machines of a data centre, one way.
const DATA_CENTRE_S: f64 = 30e-6;

/// What NCCL sends ahead: its buffer of a channel.
const NCCL_BUFFER: f64 = 4.0 * 1024.0 * 1024.0;

fn nccl() -> Costs {
    // The rate is what iperf3 measured, which is payload.
    Costs { message_s: NCCL_STEP_S, packet_overhead: 0.0, ahead_bytes: NCCL_BUFFER, ..Costs::default() }
}

fn all_reduce(elements: usize) -> Work {
    Work::Collective(Collective { algorithm: Some(Algorithm::Ring), ..Collective::of_all(OpKind::AllReduce, elements) })
}

/// The tensors of that model: two embeddings, and six blocks with four products of attention, three of the feed-forward part and two norms.
fn tensors() -> Vec<usize> {
    let mut tensors = vec![50_257 * 256, 50_257 * 256, 256];
    for _ in 0..6 {
        tensors.extend([256 * 256; 4]);
        tensors.extend([256 * 768; 3]);
        tensors.extend([256; 2]);
    }
    tensors
}

/// One cell of `diloco-measured`.
struct Cell {
    algorithm: String,
    rate: f64,
    steps: f64,
    synchronisations: f64,
    compute_s: f64,
    wall_s: f64,
}

fn cells() -> Vec<Cell> {
    let text = include_str!("../data/diloco_measured.csv");
    let lines = text.lines().filter(|line| !line.starts_with('#')).skip(1);
    let cell = |line: &str| {
        let fields: Vec<&str> = line.split(',').collect();
        let number = |index: usize| fields[index].parse::<f64>().unwrap();
        Cell {
            algorithm: fields[0].into(),
            rate: number(3),
            steps: number(4),
            synchronisations: number(5),
            compute_s: number(6) / 1e3,
            wall_s: number(7),
        }
    };
    lines.map(cell).collect()
}

/// Seconds of one synchronisation: a tensor after the other, over a token bucket whose queue holds what passes in 50 ms.
fn synchronisation(rate: f64) -> f64 {
    let of_rank = |_| {
        let mut trace = RankTrace::default();
        let mut after = Vec::new();
        for elements in tensors() {
            after = vec![trace.push("pseudo-gradient", after, all_reduce(elements))];
        }
        trace
    };
    let trace = Trace { name: "synchronisation".into(), steps: 1, ranks: (0..4).map(of_rank).collect() };
    let mut link = Link::even("shaped", Some(rate), DATA_CENTRE_S);
    link.mtu = 9001;
    link.usual.up.queue_bytes = Some(0.05 * rate / 8.0);
    let network = Network { link, costs: nccl(), processors: Processors::Own { cores: 8.0 }, threads: 1.0 };
    simulate(&trace, &network, Detail::EveryRank).unwrap().step_s
}

#[test]
fn diloco_on_shaped_links() {
    assert_eq!(tensors().iter().sum::<usize>(), 30_846_720);
    let mut errors = Vec::new();
    let mut plain = Vec::new();
    for cell in &cells() {
        let predicted = cell.steps * cell.compute_s + cell.synchronisations * synchronisation(cell.rate);
        let ring = cell.steps * cell.compute_s + cell.synchronisations * 1.5 * 30_846_720.0 * 4.0 * 8.0 / cell.rate;
        println!(
            "{} at {:.0} Mbit/s, {} synchronisations: {:.1} s measured, {predicted:.1} predicted ({:+.1} %), {ring:.1} by the ring's bytes ({:+.1} %)",
            cell.algorithm,
            cell.rate / 1e6,
            cell.synchronisations,
            cell.wall_s,
            100.0 * (predicted / cell.wall_s - 1.0),
            100.0 * (ring / cell.wall_s - 1.0),
        );
        // How ddp's library cuts gradients into buckets, and what it does beside the ring, is not in the records: it is printed, and counts for nothing.
        if cell.algorithm != "ddp" {
            errors.push((predicted / cell.wall_s - 1.0).abs());
            plain.push((ring / cell.wall_s - 1.0).abs());
        }
    }
    errors.sort_by(f64::total_cmp);
    plain.sort_by(f64::total_cmp);
    assert_eq!(errors.len(), 32);
    let (median, worst) = (errors[16], errors[31]);
    println!("median {median:.3}, worst {worst:.3}; by the ring's bytes {:.3}, {:.3}", plain[16], plain[31]);
    assert!(median < 0.086 && worst < 0.21, "median {median:.3}, worst {worst:.3}");
    assert!(median < plain[16] && worst < plain[31]);
}

/// Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow" (2018): 90 % of linear scaling with 512 GPUs, 128 machines of four P100 with
/// 25 Gbit/s each, for ResNet-101 and Inception V3. Assumed: 44.5 million parameters in f32; a step of 64 images in 0.48 s, of which the backward
/// pass is two thirds; buffers of 64 MiB that leave while it goes on; three of four steps of the ring inside a machine.
#[test]
fn horovod_with_512_gpus() {
    let (parameters, step, fusion) = (44_500_000_usize, 0.48, 64 << 20);
    let buffers = (parameters * 4).div_ceil(fusion);
    let of_rank = |_| {
        let mut trace = RankTrace::default();
        let ns = |seconds: f64| (seconds * 1e9) as u64;
        let mut computed = trace.push("forward", vec![], Work::Compute { ns: ns(step / 3.0) });
        let mut left = parameters;
        for _ in 0..buffers {
            let elements = left.min(fusion / 4);
            left -= elements;
            let share = elements as f64 / parameters as f64;
            computed = trace.push("backward", vec![computed], Work::Compute { ns: ns(step * 2.0 / 3.0 * share) });
            let reduced = Collective {
                algorithm: Some(Algorithm::Ring),
                background: true,
                ..Collective::of_all(OpKind::AllReduce, elements)
            };
            trace.push("gradients", vec![computed], Work::Collective(reduced));
        }
        trace
    };
    let trace = Trace { name: "ResNet-101".into(), steps: 1, ranks: (0..512).map(of_rank).collect() };
    let network = Network {
        link: Link::even("25 Gbit/s", Some(25e9), 0.25 * DATA_CENTRE_S),
        costs: Costs { message_s: NCCL_STEP_S, ..Costs::default() },
        processors: Processors::Own { cores: 4.0 },
        threads: 1.0,
    };
    let outcome = simulate(&trace, &network, Detail::Auto).unwrap();
    println!("{:.1} ms a step, {:.1} % of linear", 1e3 * outcome.step_s, 100.0 * step / outcome.step_s);
    assert_eq!(outcome.classes, 1);
    let efficiency = step / outcome.step_s;
    assert!((0.85..0.95).contains(&efficiency), "{efficiency}");
}

/// Others have measured 106 ms for 100 MB of gradients of four RTX 3090 over 10 Gbit/s; how they were connected is not told. Assumed: a machine for each, NCCL's ring,
/// nothing beside it. A ring moves 150 MB through each link then, for which 120 ms are the least: what was measured was less, or not all of it on that
/// link. So the prediction, which cannot be below that, is too long by what it prints.
#[test]
fn four_gpus_over_10_gbit() {
    const MEASURED_S: f64 = 0.106;
    let of_rank = |_| {
        let mut trace = RankTrace::default();
        trace.push("gradients", vec![], all_reduce(25_000_000));
        trace
    };
    let trace = Trace { name: "100 MB".into(), steps: 1, ranks: (0..4).map(of_rank).collect() };
    let network = Network {
        link: Link::even("10 Gbit/s", Some(10e9), DATA_CENTRE_S),
        costs: nccl(),
        processors: Processors::Own { cores: 8.0 },
        threads: 1.0,
    };
    let predicted = simulate(&trace, &network, Detail::EveryRank).unwrap().step_s;
    let least = 1.5 * 100e6 * 8.0 / 10e9;
    println!(
        "4 GPUs over 10 Gbit/s, 100 MB: 106 ms measured, {:.1} predicted ({:+.1} %), {:.1} by the ring's bytes ({:+.1} %)",
        1e3 * predicted,
        100.0 * (predicted / MEASURED_S - 1.0),
        1e3 * least,
        100.0 * (least / MEASURED_S - 1.0)
    );
    assert!((1.0..1.15).contains(&(predicted / least)), "{predicted} s, of {least} at least");
}
