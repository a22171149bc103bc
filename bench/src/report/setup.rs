//! What was run, where, and what is missing or doubtful.

use std::collections::{BTreeMap, BTreeSet};

use rig::flag::{Flag, FlagKind};
use rig::record::{Axis, Cell, Record};
use serde_json::Value;

use super::digest::{Case, Digest, distinct};
use super::hosts;
use super::html::{Page, Table};
use super::text::{bytes, count, figure, listed, maybe};

/// Values of an axis that are named in the table.
const NAMED: usize = 24;

/// What must stand above everything else.
pub(super) fn beware(page: &mut Page, digest: &Digest<'_>) {
    let debug =
        digest.results.records.iter().filter(|record| facts(record).get("debug_build") == Some(&Value::Bool(true)));
    if debug.count() > 0 {
        page.warning("these runs are of a debug build, whose times are not meaningful.");
    }
    if distinct(digest.results.records.iter().map(|record| facts(record).to_string())).len() > 1 {
        page.warning("these runs are not all of one machine, kernel, congestion control and commit; the table of environments shows the differences.");
    }
    if digest.results.records.is_empty() {
        page.warning("there are no results in this folder.");
    }
}

/// `planned` rounds, 0 where that is not known.
pub(super) fn write(page: &mut Page, digest: &Digest<'_>, planned: u32) {
    page.topic("setup", "What was run, where, and what is missing");
    let records = &digest.results.records;
    let rounds = records.iter().map(|record| record.round).max().unwrap_or(0);
    let began = records.iter().map(|record| record.started_unix_s).fold(f64::INFINITY, f64::min);
    let ended = records.iter().map(|record| record.started_unix_s + record.wall_s).fold(f64::NEG_INFINITY, f64::max);
    let took = if ended > began {
        format!(" It took {} minutes from the first start to the last end.", figure((ended - began) / 60.0))
    } else {
        String::new()
    };
    page.text(&format!(
        "{}, {}, {}.{took}",
        count(digest.cases.len(), "cell"),
        count(rounds as usize, "round"),
        count(records.len(), "run")
    ));
    if rounds < planned {
        page.text(&format!("The plan asks for {}.", count(planned as usize, "round")));
    }
    axes(page, digest);
    environments(page, records);
    links(page, digest);
    hosts::write(page, digest);
    flags(page, digest);
    holes(page, digest);
}

/// The values of each axis.
fn axes(page: &mut Page, digest: &Digest<'_>) {
    if digest.cases.is_empty() {
        return;
    }
    let mut varied = Table::new(&["axis", "values"], 2);
    let mut fixed = Table::new(&["axis", "value"], 2);
    let differs = Cell::varied(digest.cases.iter().map(|case| case.cell));
    for axis in Axis::ALL {
        let values = distinct(digest.cases.iter().map(|case| case.cell.value(axis)));
        let table = if differs.contains(&axis) { &mut varied } else { &mut fixed };
        let named = |value: &String| if value.is_empty() { "(none)".to_string() } else { value.clone() };
        table.row(vec![axis.to_string(), listed(&values.iter().map(named).collect::<Vec<_>>(), NAMED)]);
    }
    if !varied.rows.is_empty() {
        page.heading("What differs between cells");
        page.table(&varied);
    }
    page.folded_table("What all cells share", &fixed);
}

/// An environment's fields, by name.
fn facts(record: &Record) -> Value {
    serde_json::to_value(&record.environment).unwrap_or(Value::Null)
}

fn environments(page: &mut Page, records: &[Record]) {
    let all = distinct(records.iter().map(facts));
    let names: BTreeSet<&String> = all.iter().filter_map(Value::as_object).flat_map(|fields| fields.keys()).collect();
    if names.is_empty() {
        return;
    }
    page.heading("Where");
    let head: Vec<String> = match all.len() {
        1 => vec!["".into(), "value".into()],
        several => {
            std::iter::once(String::new()).chain((1..=several).map(|number| format!("environment {number}"))).collect()
        }
    };
    let mut table = Table { names: head.len(), head, rows: Vec::new() };
    for name in names {
        let value = |environment: &Value| match (name.as_str(), environment.get(name)) {
            ("memory_bytes", Some(value)) => bytes(value.as_f64().unwrap_or(f64::NAN)),
            (_, Some(Value::String(text))) if text.is_empty() => "unknown".into(),
            (_, Some(Value::String(text))) => text.clone(),
            ("debug_build", Some(Value::Bool(debug))) => if *debug { "YES" } else { "no" }.into(),
            (_, Some(other)) => other.to_string(),
            (_, None) => "–".into(),
        };
        // Cells may have asked for another one.
        let called = match name.as_str() {
            "congestion_control" => "system's default congestion control".into(),
            other => other.replace('_', " "),
        };
        table.row(std::iter::once(called).chain(all.iter().map(value)).collect());
    }
    page.table(&table);
}

fn links(page: &mut Page, digest: &Digest<'_>) {
    let mut table = Table::new(&["link", "what it is", "of", "rate (Mbit/s)", "smallest round trip seen (ms)"], 3);
    for name in distinct(digest.cases.iter().map(|case| case.cell.link.as_str())) {
        let here: Vec<&Case<'_>> = digest.cases.iter().filter(|case| case.cell.link == name).collect();
        let Some(first) = here.first() else { continue };
        let traits = [maybe(first.traits.rate), maybe(first.traits.rtt)];
        let described = |case: &Case<'_>| case.good.first().map(|run| run.measured.link.description.clone());
        let descriptions = distinct(here.iter().filter_map(|case| described(case)));
        for description in &descriptions {
            let who = match descriptions.len() {
                1 => "all".into(),
                _ => who(&here, &|case| described(case).as_ref() == Some(description)),
            };
            let text = if description.is_empty() { "–" } else { description.as_str() };
            table.row([vec![name.into(), text.into(), who], traits.to_vec()].concat());
        }
        if descriptions.is_empty() {
            table.row([vec![name.into(), "–".into(), "–".into()], traits.to_vec()].concat());
        }
    }
    if !table.rows.is_empty() {
        page.heading("Links");
        page.table(&table);
    }
}

/// Which of the cells of a link are meant: `2 ranks; hierarchical with 4 ranks`.
fn who(cases: &[&Case<'_>], meant: &dyn Fn(&Case<'_>) -> bool) -> String {
    let with_figures = || cases.iter().filter(|case| !case.good.is_empty());
    let numbers: BTreeSet<usize> = with_figures().map(|case| case.cell.ranks).collect();
    let mut parts = Vec::new();
    for number in numbers {
        let strategies = |meant: &dyn Fn(&Case<'_>) -> bool| {
            let mine = with_figures().filter(|case| case.cell.ranks == number && meant(case));
            distinct(mine.map(|case| case.cell.strategy.clone()))
        };
        let (mine, others) = (strategies(meant), strategies(&|case| !meant(case)));
        let ranks = count(number, "rank");
        match (mine.is_empty(), others.is_empty()) {
            (true, _) => {}
            (false, true) => parts.push(ranks),
            (false, false) if others.len() < mine.len() && others.iter().all(|name| !mine.contains(name)) => {
                parts.push(format!("all but {} with {ranks}", listed(&others, 4)))
            }
            (false, false) => parts.push(format!("{} with {ranks}", listed(&mine, 4))),
        }
    }
    parts.join("; ")
}

/// What a doubt means.
fn meaning(kind: FlagKind) -> (&'static str, &'static str) {
    match kind {
        FlagKind::OffTheFormula => {
            ("off the formula", "bytes, messages or operations are not what the strategy's formula says")
        }
        FlagKind::MachineBusy => ("machine busy", "other processes or virtual machines took processor time"),
        FlagKind::ClockMoved => ("clock moved", "the processor ran faster or slower after the run than before"),
        FlagKind::EmulatorBehind => ("emulator behind", "the emulator, not the link that it plays, held packets back"),
        FlagKind::SharedCores => ("shared cores", "more ranks than processor cores: ranks wait for cores, too"),
        FlagKind::NoSteadyState => ("no steady state", "steps never settled"),
    }
}

fn flags(page: &mut Page, digest: &Digest<'_>) {
    let mut kinds: BTreeMap<FlagKind, (usize, BTreeSet<usize>, String)> = BTreeMap::new();
    for (place, case) in digest.cases.iter().enumerate() {
        for (_, flag) in &case.flags {
            let seen = kinds.entry(flag.kind).or_insert((0, BTreeSet::new(), flag.what.clone()));
            seen.0 += 1;
            seen.1.insert(place);
        }
    }
    page.heading("Doubts");
    if kinds.is_empty() {
        page.text("There are no doubts about any run.");
        return;
    }
    let mut table = Table::new(&["doubt", "what it means", "for example", "runs", "cells"], 3);
    for (kind, (runs, cells, example)) in kinds {
        let (name, meaning) = meaning(kind);
        table.row(vec![name.into(), meaning.into(), example, runs.to_string(), cells.len().to_string()]);
    }
    page.table(&table);
    let mut all = Table::new(&["cell", "doubt", "for example", "rounds"], 3);
    for case in &digest.cases {
        for kind in case.flags.iter().map(|(_, flag)| flag.kind).collect::<BTreeSet<_>>() {
            let of_kind: Vec<&(u32, Flag)> = case.flags.iter().filter(|(_, flag)| flag.kind == kind).collect();
            let rounds: Vec<String> = distinct(of_kind.iter().map(|(round, _)| round.to_string()));
            let example = of_kind.first().map_or(String::new(), |(_, flag)| flag.what.clone());
            all.row(vec![digest.label(case.cell), meaning(kind).0.into(), example, listed(&rounds, NAMED)]);
        }
    }
    page.folded_table("Every doubt", &all);
}

/// Every cell that is without figures in some round, and why.
fn holes(page: &mut Page, digest: &Digest<'_>) {
    page.heading("Cells without figures");
    let rounds = distinct(digest.results.records.iter().map(|record| record.round)).len();
    let mut table = Table::new(&["cell", "what happened", "why", "runs with figures", "of rounds"], 3);
    for case in digest.cases.iter().filter(|case| case.good.len() < rounds) {
        let (how, why) = match case.left_out.is_empty() && !case.good.is_empty() {
            true => ("not reached".into(), "the sweep ended before its later rounds".into()),
            false => case.hole(),
        };
        table.row(vec![digest.label(case.cell), how, why, case.good.len().to_string(), rounds.to_string()]);
    }
    if table.rows.is_empty() {
        page.text("None: every cell has figures of every round.");
    } else {
        page.table(&table);
    }
    digest.results.warnings.iter().for_each(|warning| page.warning(warning));
}
