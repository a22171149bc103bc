//! What is made of single cells and pairs of them: whether it is judged as the page says.

use std::path::PathBuf;

use rig::flag::FlagKind;
use rig::record::{Measured, Rank, Record};
use rig::results::Results;
use rig::why::Connection;

use super::super::case::{LATE, NETWORK};
use super::super::digest::{Case, Digest};
use super::super::synthetic::{cell, sweep};
use super::written;

fn results(records: Vec<Record>) -> Results {
    Results { file: PathBuf::new(), records, warnings: Vec::new(), whole_bytes: 0 }
}

/// Five rounds of a strategy over TCP.
fn runs(strategy: &str, link: &str, ranks: usize) -> Vec<Record> {
    let all = sweep(&["tcp"], &[ranks], 5).into_iter();
    all.filter(|run| run.cell.strategy == strategy && run.cell.link == link).collect()
}

/// The runs, each of its ranks changed.
fn changed(mut runs: Vec<Record>, change: impl Fn(&mut Rank)) -> Vec<Record> {
    let measured = |run: &mut Record, change: &dyn Fn(&mut Rank)| {
        run.measured.iter_mut().flat_map(|measured| &mut measured.ranks).for_each(change);
    };
    runs.iter_mut().for_each(|run| measured(run, &change));
    runs
}

fn renamed(runs: &[Record], strategy: &str) -> Vec<Record> {
    runs.iter()
        .map(|run| Record { cell: cell(strategy, "tcp", &run.cell.link, run.cell.ranks), ..run.clone() })
        .collect()
}

fn with_digest<T>(records: Vec<Record>, judge: impl FnOnce(&Digest<'_>) -> T) -> T {
    judge(&Digest::of(&results(records), &[]))
}

#[test]
fn waiting_for_loss_and_norm_is_waiting_for_the_network_and_late_ranks_are_apart() {
    let slower = changed(runs("ddp", "wan", 2), |rank| {
        let steps = &mut rank.steps;
        for step in 0..steps.total.len() {
            (steps.exposed[step], steps.scalars[step], steps.skew[step]) = (10.0, 30.0, 20.0);
            (steps.compute[step], steps.total[step]) = (40.0, 100.0);
        }
    });
    with_digest(slower, |digest| {
        let shares = [&NETWORK[..], &LATE].map(|parts| digest.cases[0].share_of(parts).unwrap().estimate);
        assert!((shares[0] - 0.4).abs() < 1e-9 && (shares[1] - 0.2).abs() < 1e-9, "{shares:?}");
        assert!((digest.cases[0].ms_of(&NETWORK).unwrap().estimate - 40.0).abs() < 1e-9);
    });
}

#[test]
fn what_a_link_adds_is_told_against_the_same_cell_over_loopback() {
    let mut records = runs("ddp", "wan", 2);
    let mut there = changed(records.clone(), |rank| rank.steps.total.iter_mut().for_each(|ms| *ms -= 30.0));
    there.iter_mut().for_each(|run| run.cell.link = "loopback".into());
    records.extend(there);
    let (html, _) = written(records);
    assert!(html.contains("2 ranks), a step takes 30.00 ["), "{html}");
    assert!(html.contains("ms (ddp) more than on loopback"));
}

#[test]
fn a_strategy_whose_neighbours_share_ends_is_told_of() {
    let ring = runs("ring", "wan", 4);
    let mut hierarchical = changed(renamed(&ring, "hierarchical"), |rank| {
        rank.steps.total.iter_mut().for_each(|ms| *ms *= 0.5);
    });
    for measured in hierarchical.iter_mut().filter_map(|run| run.measured.as_mut()) {
        measured.link.description = measured.link.description.replace("4 network namespaces", "2 network namespaces");
    }
    let (html, _) = written([hierarchical, ring].concat());
    for text in [
        "hierarchical: neighbouring ranks form a node",
        "hierarchical has 2 ends for 4 ranks",
        "<td class=\"name\">hierarchical with 4 ranks</td>",
        "<td class=\"name\">ring with 4 ranks</td>",
    ] {
        assert!(html.contains(text), "`{text}` is not said");
    }
}

#[test]
fn a_rank_is_named_for_most_of_all_waiting_and_not_for_most_of_what_is_explained() {
    let late = |waited: f64, strategy: &str| {
        let named = renamed(&runs("ring", "lan", 2), strategy);
        changed(named, |rank| {
            rank.steps.skew.iter_mut().for_each(|ms| *ms = 50.0);
            rank.waited_for = if rank.rank == 1 { vec![2.0 * waited, 0.0] } else { vec![0.0, 0.0] };
        })
    };
    assert!(written(late(10.0, "ring")).0.contains("no rank stands out."));
    assert!(written(late(40.0, "ring")).0.contains("80.0 % of it for rank 0."));
    assert!(written(late(40.0, "ps")).0.contains("80.0 % of it for the server."));
    let none = changed(runs("ring", "lan", 2), |rank| rank.steps.skew.iter_mut().for_each(|ms| *ms = 0.2));
    assert!(!written(none).0.contains("still computing;"));
}

#[test]
fn congestion_controls_are_those_of_connections_that_carry_bytes_in_whatever_order() {
    let both = |names: [&str; 2]| {
        let mut records: Vec<Record> = sweep(&["tcp", "quic"], &[2], 3)
            .into_iter()
            .filter(|run| run.cell.strategy == "ddp" && run.cell.link == "lan")
            .collect();
        for run in &mut records {
            let quic = run.cell.transport == "quic";
            let order = if quic { [names[1], names[0]] } else { names };
            for rank in run.measured.iter_mut().flat_map(|measured: &mut Measured| &mut measured.ranks) {
                let connections = &mut rank.network.connections;
                let first = Connection { congestion: order[0].into(), ..connections[0].clone() };
                let second = Connection { congestion: order[1].into(), ..connections[0].clone() };
                let idle = Connection { congestion: "vegas".into(), bytes_sent: 40, ..connections[0].clone() };
                *connections = vec![first, second, idle];
            }
        }
        written(records).0
    };
    let html = both(["bbr", "cubic"]);
    assert!(html.contains("on every link both under bbr and cubic"));
    // Two ranks, three rounds, two transports, and of the two connections that carry bytes one.
    assert!(html.contains("Of 24 connections") && html.contains("12 bbr instead of cubic") && !html.contains("vegas"));
    assert!(!both(["cubic", "cubic"]).contains("instead of cubic"));
}

#[test]
fn ranks_that_share_cores_are_labelled_and_left_out_of_the_short_answer() {
    let (html, _) = written(sweep(&["tcp"], &[2, 4], 3));
    let short = html.split_once("id=\"strategy\"").unwrap().1.split_once("<details").unwrap().0;
    assert!(short.contains("round trip; 2 ranks):") && !short.contains("4 ranks on"), "{short}");
    let trust = html.split_once("id=\"trust\"").unwrap().1.split_once("<details").unwrap().0;
    assert!(trust.contains("leave out cells whose ranks share cores"));
    assert!(trust.contains("had ranks that shared cores (4 ranks on ") && trust.contains("ran on a busy machine"));
    assert!(
        trust.contains("What was sent is what the formulas say, to the byte, in all runs that count it ("),
        "{trust}"
    );
    assert!(html.contains("ddp tcp wan (4 ranks on ") || html.contains("ddp wan (4 ranks on "));
}

#[test]
fn the_ratio_alone_decides() {
    // A tenth slower in every round, of steps that differ so much between rounds that the difference does not stay away from 0.
    let drifting = |factor: f64, strategy: &str| {
        let mut runs = renamed(&runs("ring", "lan", 2)[..3], strategy);
        for (run, level) in runs.iter_mut().zip([10.0, 100.0, 1000.0]) {
            for rank in run.measured.iter_mut().flat_map(|measured| &mut measured.ranks) {
                rank.steps.total.iter_mut().for_each(|ms| *ms = factor * level);
            }
        }
        runs
    };
    let both = [drifting(1.0, "ring"), drifting(1.1, "ddp")].concat();
    with_digest(both, |digest| {
        let of = |name: &str| digest.cases.iter().find(|case: &&Case<'_>| case.cell.strategy == name).unwrap();
        let found = of("ddp").against(of("ring")).unwrap();
        assert!(found.difference.contains(0.0) && !found.ratio.contains(1.0) && found.verdict == 1, "{found:?}");
    });
}

#[test]
fn strategies_with_wide_intervals_are_not_among_the_fastest() {
    let noisy = |strategy: &str, shift: usize| {
        let mut runs = renamed(&runs("ring", "lan", 2), strategy);
        for (round, run) in runs.iter_mut().enumerate() {
            let level = 100.0 + 40.0 * ((round + shift) % 3) as f64;
            for rank in run.measured.iter_mut().flat_map(|measured| &mut measured.ranks) {
                rank.steps.total.iter_mut().for_each(|ms| *ms = level);
            }
        }
        runs
    };
    let (html, _) = written([noisy("ring", 0), noisy("ddp", 1), noisy("fsdp", 2)].concat());
    assert!(
        html.contains("the strategies cannot be told apart; the shortest mean step is that of"),
        "no word of noise"
    );
    assert!(!html.contains("is the fastest with") && !html.contains("has the shortest step"));
}

#[test]
fn runs_that_never_settle_are_doubted_whoever_found_it() {
    let rising = changed(runs("ddp", "lan", 2), |rank| {
        rank.steps.total.iter_mut().enumerate().for_each(|(step, ms)| *ms = 100.0 + 20.0 * step as f64);
    });
    assert!(rising.iter().all(|run| run.flags.iter().all(|flag| flag.kind != FlagKind::NoSteadyState)));
    with_digest(rising.clone(), |digest| assert!(digest.cases[0].is_flagged(FlagKind::NoSteadyState)));
    assert!(written(rising).0.contains("In some run of 1 cell steps never settled"));
}

#[test]
fn lossy_links_are_no_matter_for_textbooks() {
    let ring = |ranks: usize| {
        changed(runs("ring", "mobile", ranks), |rank| {
            rank.steps.scalars.iter_mut().for_each(|ms| *ms += 1000.0);
            rank.steps.total.iter_mut().for_each(|ms| *ms += 1000.0);
        })
    };
    assert!(!written([ring(2), ring(4)].concat()).0.contains("nothing but latency"));
}
