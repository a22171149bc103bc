//! Shares and times are those that were planted.

use std::path::PathBuf;

use rig::flag::{Flag, FlagKind};
use rig::record::{Cell, LOOPBACK, NOBODY, Record};
use rig::results::Results;
use rig::stats::made_up::record;

use super::*;

const STEPS: u64 = 24;
const LONG: u64 = 40;

/// Name and rate in Mbit/s.
const LINKS: [(&str, u32); 3] = [("lan-10m", 10), ("lan-100m", 100), ("lan-1g", 1000)];

fn cell(strategy: &str, transport: &str, link: &str) -> Cell {
    let ranks = if strategy == "hierarchical" { 4 } else { 2 };
    let (strategy, transport, link) = (strategy.to_string(), transport.to_string(), link.to_string());
    Cell { strategy, transport, link, ranks, batch: 24, steps: STEPS, sync_every: Some(8), ..Cell::default() }
}

/// Ranks that talk to nobody.
fn alone(ranks: usize, ms: f64) -> Record {
    let cell = Cell { strategy: SINGLE.into(), alone: true, ranks, ..cell("ddp", NOBODY, LOOPBACK) };
    record(Cell { sync_every: None, ..cell }, 1, &[ms; STEPS as usize])
}

/// A run whose ranks send at most so many bytes a step.
fn run(cell: Cell, ms: f64, sent: u64) -> Record {
    let mut record = record(cell.clone(), 1, &vec![ms; cell.steps as usize]);
    let measured = record.measured.as_mut().unwrap();
    let rate = LINKS.into_iter().find(|(link, _)| *link == cell.link).unwrap().1;
    measured.link.description =
        format!("{}: 2 network namespaces, veth; up ({rate}mbit), down ({rate}mbit)", cell.link);
    for (rank, figures) in measured.ranks.iter_mut().enumerate() {
        (figures.payload_bytes, figures.payload_expected) = (Some(sent - rank as u64), sent - rank as u64);
    }
    if cell.ranks > 2 {
        let what = "4 rank(s) of 1 computing thread(s) share 2 cores".into();
        record.flags.push(Flag { kind: FlagKind::SharedCores, what });
    }
    record
}

/// Ten milliseconds are computed. ddp sends 10 ms at 1 Gbit/s, and diloco an eighth of it; ddp learns by a hundredth a step from 5, diloco half as
/// fast. Four ranks compute for 20 ms on two cores.
fn planted() -> Vec<Record> {
    let mut records = vec![alone(2, 10.0), alone(4, 20.0)];
    let sent = 1_250_000;
    for (link, rate) in LINKS {
        for (transport, more) in [("tcp", 0.0), ("quic", 10.0)] {
            let network = 10.0 * 1000.0 / f64::from(rate);
            records.push(run(cell("ddp", transport, link), 10.0 + network + more, sent));
            records.push(run(cell("diloco", transport, link), 10.0 + network / 8.0 + more, sent / 8));
            records.push(run(cell("hierarchical", transport, link), 20.0 + network + more, sent));
        }
    }
    for (strategy, a_step, sent) in [("ddp", 0.01, sent), ("diloco", 0.005, sent / 8)] {
        let mut long = run(Cell { steps: LONG, ..cell(strategy, "tcp", "lan-1g") }, 20.0, sent);
        let losses = (0..LONG).map(|step| Some(5.0 - a_step * step as f64)).collect();
        long.measured.as_mut().unwrap().losses = losses;
        records.push(long);
    }
    records
}

fn results(records: Vec<Record>) -> Results {
    Results { file: PathBuf::new(), records, warnings: Vec::new(), whole_bytes: 0 }
}

#[test]
fn shares_and_loads_are_those_that_were_planted() {
    let results = results(planted());
    let digest = Digest::of(&results, &[]);
    let bandwidth = Bandwidth::of(&digest).unwrap();
    assert_eq!(bandwidth.links(), ["lan-1g", "lan-100m", "lan-10m"]);
    assert_eq!(bandwidth.transports(), ["tcp", "quic"]);
    let of = |name: &str, link: &str, transport: &str| {
        let cell = bandwidth.get(name, link, transport).unwrap();
        ((1000.0 * cell.utilisation).round() / 1000.0, (1000.0 * cell.load.unwrap()).round() / 1000.0)
    };
    // Sending takes as long as computing at 1 Gbit/s.
    assert_eq!(of("ddp", "lan-1g", "tcp"), (0.5, 1.0));
    assert_eq!(of("ddp", "lan-10m", "tcp"), (0.01, 100.0));
    assert_eq!(of("diloco", "lan-1g", "tcp"), (0.889, 0.125));
    assert_eq!(of("ddp", "lan-1g", "quic").0, 0.333);
    // By four ranks on two cores that talk to nobody.
    assert_eq!(of("hierarchical", "lan-1g", "tcp").0, 0.667);
    assert_eq!(bandwidth.get("hierarchical", "lan-1g", "tcp").unwrap().share(), "67 %*");
}

#[test]
fn the_time_to_a_loss_is_that_of_as_many_steps_over_the_link() {
    let results = results(planted());
    let digest = Digest::of(&results, &[]);
    let bandwidth = Bandwidth::of(&digest).unwrap();
    // The mean of steps 11 to 20, of losses 4.90 to 4.81.
    let (loss, steps) = bandwidth.target().unwrap();
    assert!((loss - 4.855).abs() < 1e-9 && steps == 20, "{loss} after {steps}");
    let seconds = |name: &str, link: &str| {
        bandwidth.seconds_to(loss, name, link, "tcp").map(|seconds| (1000.0 * seconds).round() / 1000.0)
    };
    // 20 steps of 20 ms; of diloco the mean falls to it after 35, of 11.25 ms.
    assert_eq!(seconds("ddp", "lan-1g"), Some(0.4));
    assert_eq!(seconds("diloco", "lan-1g"), Some(0.394));
    assert_eq!(seconds("ddp", "lan-10m"), Some(20.2));
    assert_eq!(seconds("hierarchical", "lan-1g"), None, "it has no long run");
}

#[test]
fn the_answer_is_said_on_a_terminal_and_on_the_page() {
    let results = results(planted());
    let digest = Digest::of(&results, &[]);
    let text = text(&digest).unwrap();
    assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
    let said = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "On lan-1g (1 Gbit/s), ddp over tcp computes 50 % of the time; diloco has the largest share, 89 %.",
        "ddp computes over quic 33 % on lan-1g, 8 % on lan-100m and 1 % on lan-10m.",
        " takes ddp 20 steps. The first to reach it over tcp is on lan-1g diloco, after 0.394 s (ddp 0.400 s);",
        "(diloco-measured, 30.8 M parameters, 4 GPUs) it is 99 %.",
        "Of that share diloco reaches here 100 % over tcp and ",
        "After 1 round small differences may be chance.",
        "Share of the time that is computed, over tcp:",
        "hierarchical 67 %*",
        "* 4 ranks on 2 cores",
    ] {
        assert!(said.contains(part), "`{part}` is not said: {said}");
    }
    let mut page = Page::default();
    write(&mut page, &digest);
    // For each transport a curve and a loss on each link, and two more of losses and one of the public measurement.
    assert_eq!(page.figures.len(), 2 + 2 * LINKS.len() + 2 + 1);
    let html = page.finish("title");
    for part in ["public, every 128 steps", "It has no FSDP", "id=\"bandwidth\"", "To a loss of 4.8"] {
        assert!(html.contains(part), "`{part}` is not on the page");
    }
    assert!(!html.contains("NaN") && !html.contains(">inf"));
}

#[test]
fn without_ranks_that_compute_alone_nothing_is_said() {
    let mut records = planted();
    records.retain(|record| !record.cell.alone);
    let results = results(records);
    assert!(text(&Digest::of(&results, &[])).is_none());
}

#[test]
fn no_two_lines_look_alike() {
    let plain = super::super::order::STRATEGIES.map(|name| curve(name, Vec::new()));
    let mut looks: Vec<_> =
        plain.iter().filter(|line| line.dashed).map(|line| (line.colour, line.mark.unwrap())).collect();
    for strategy in COMPRESSIBLE {
        looks.extend(["int8", "sign", "topk:0.01", "powersgd:2"].map(|compress| look(strategy, compress)));
    }
    assert_eq!(distinct(looks.iter()).len(), looks.len(), "{looks:?}");
}
