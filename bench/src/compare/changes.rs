//! What changed between two sweeps besides their timings.

use std::collections::BTreeSet;

use rig::record::{Measured, Record};
use rig::stats::CellRuns;
use serde::Serialize;

/// Something that was different.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Difference {
    pub(crate) what: String,
    pub(crate) before: String,
    pub(crate) after: String,
    /// In which cells; empty for all.
    pub(crate) cells: Vec<String>,
}

/// Machine, kernel, code: whatever the environments of all runs say.
pub(super) fn environments_changed(a: &[Record], b: &[Record]) -> Vec<Difference> {
    let (before, after) = (environment(a), environment(b));
    let mut names: Vec<&String> = before.iter().chain(&after).map(|(name, _)| name).collect();
    names.dedup();
    let mut changes: Vec<Difference> = Vec::new();
    for name in names {
        let values = |of: &[(String, BTreeSet<String>)]| {
            of.iter().find(|(other, _)| other == name).map(|(_, values)| values.clone()).unwrap_or_default()
        };
        let (before, after) = (values(&before), values(&after));
        if changes.iter().all(|change| change.what != *name) && before != after && !nearly(&before, &after) {
            let text = |values: BTreeSet<String>| values.into_iter().collect::<Vec<_>>().join(", ");
            changes.push(Difference {
                what: name.clone(),
                before: text(before),
                after: text(after),
                cells: Vec::new(),
            });
        }
    }
    changes
}

/// The values of each of an environment's fields, over all runs.
fn environment(records: &[Record]) -> Vec<(String, BTreeSet<String>)> {
    let mut fields: Vec<(String, BTreeSet<String>)> = Vec::new();
    let mut last = None;
    for record in records {
        // Thousands of runs share a few environments.
        if last == Some(&record.environment) {
            continue;
        }
        last = Some(&record.environment);
        let Ok(serde_json::Value::Object(values)) = serde_json::to_value(&record.environment) else { continue };
        for (name, value) in values {
            let value = value.as_str().map_or_else(|| value.to_string(), String::from);
            let name = name.replace('_', " ");
            match fields.iter_mut().find(|(other, _)| *other == name) {
                Some((_, values)) => drop(values.insert(value)),
                None => fields.push((name, BTreeSet::from([value]))),
            }
        }
    }
    fields
}

/// Whether these are single numbers that differ by less than a hundredth: a machine's memory differs a little from boot
/// to boot.
fn nearly(before: &BTreeSet<String>, after: &BTreeSet<String>) -> bool {
    let number = |values: &BTreeSet<String>| match values.len() {
        1 => values.first()?.parse::<f64>().ok(),
        _ => None,
    };
    number(before).zip(number(after)).is_some_and(|(before, after)| (before - after).abs() < 0.01 * before.abs())
}

/// What cells did, each beside its namesake: only what was the same in all runs of a sweep.
pub(super) fn cells_changed<'a>(
    pairs: impl Iterator<Item = (&'a str, &'a CellRuns<'a>, &'a CellRuns<'a>)>,
) -> Vec<Difference> {
    let mut changes: Vec<Difference> = Vec::new();
    let mut add = |what: String, before: String, after: String, cell: &str| {
        let same = |change: &&mut Difference| change.what == what && change.before == before && change.after == after;
        match changes.iter_mut().find(same) {
            Some(change) => change.cells.push(cell.into()),
            None => changes.push(Difference { what, before, after, cells: vec![cell.into()] }),
        }
    };
    for (label, a, b) in pairs {
        let mut compare = |what: &str, of: &dyn Fn(&Measured) -> Option<String>, told: bool| {
            if let Some((before, after)) = constant(a, of).zip(constant(b, of))
                && before != after
            {
                let (before, after) = if told { (before, after) } else { Default::default() };
                add(what.into(), before, after, label);
            }
        };
        compare("payload bytes a step, by rank", &payload, true);
        if a.cell.is_repeatable() {
            compare("weights after training", &|measured| known(&measured.weights_hash), false);
        }
        compare("parameters", &|measured| Some(measured.parameters.to_string()), true);
        compare("tokens a step", &|measured| Some(measured.tokens_per_step.to_string()), true);
        compare(&format!("link {}", a.cell.link), &|measured| known(&measured.link.description), true);
        compare("congestion control in use", &congestion, true);
        let facts =
            a.runs.iter().filter_map(|run| run.measured.as_ref()).flat_map(|measured| &measured.transport_facts);
        let names: BTreeSet<&String> = facts.map(|(name, _)| name).collect();
        for name in names {
            let fact = |measured: &Measured| {
                measured.transport_facts.iter().find(|(other, _)| other == name).map(|(_, value)| value.clone())
            };
            compare(&format!("{name} of {}", a.cell.transport), &fact, true);
        }
    }
    changes
}

/// What all runs of a cell say alike; `None` where they do not.
fn constant(cell: &CellRuns, of: &dyn Fn(&Measured) -> Option<String>) -> Option<String> {
    let mut values = cell.runs.iter().filter_map(|run| run.measured.as_ref()).map(of);
    let first = values.next()??;
    values.all(|value| value.as_ref() == Some(&first)).then_some(first)
}

fn known(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_string())
}

fn payload(measured: &Measured) -> Option<String> {
    let bytes: Option<Vec<String>> =
        measured.ranks.iter().map(|rank| rank.payload_bytes.map(|bytes| bytes.to_string())).collect();
    let mut bytes = bytes?;
    // Ranks that all send the same are said once.
    bytes.dedup();
    known(&bytes.join(", "))
}

fn congestion(measured: &Measured) -> Option<String> {
    let connections = measured.ranks.iter().flat_map(|rank| &rank.network.connections);
    let names: BTreeSet<&str> = connections.map(|connection| connection.congestion.as_str()).collect();
    known(&names.into_iter().collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rig::environment::Environment;
    use rig::stats::made_up::{cell, record};
    use rig::stats::{Keep, cell_runs};

    fn changed(change: impl Fn(&mut Measured)) -> Vec<Difference> {
        let a: Vec<Record> = (1..=2).map(|round| record(cell("ddp"), round, &[1.0; 8])).collect();
        let mut b = a.clone();
        b.iter_mut().for_each(|run| change(run.measured.as_mut().unwrap()));
        let (a, b) = (cell_runs(&a, Keep::Sound), cell_runs(&b, Keep::Sound));
        cells_changed(std::iter::once(("ddp", &a[0], &b[0])))
    }

    #[test]
    fn what_cells_did_otherwise_is_said() {
        assert_eq!(changed(|_| ()), []);
        let found = changed(|measured| measured.weights_hash = "def".into());
        assert_eq!((found[0].what.as_str(), found[0].before.as_str()), ("weights after training", ""));
        let found = changed(|measured| measured.ranks[1].payload_bytes = Some(5));
        assert_eq!((found[0].before.as_str(), found[0].after.as_str()), ("1000, 999", "1000, 5"));
        assert_eq!(found[0].cells, ["ddp"]);
        let found = changed(|measured| measured.parameters += 1);
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn what_varies_in_a_sweep_is_not_said_to_have_changed() {
        let a: Vec<Record> = (1..=2).map(|round| record(cell("ddp"), round, &[1.0; 8])).collect();
        let mut b = a.clone();
        b[0].measured.as_mut().unwrap().weights_hash = "def".into();
        let (a, b) = (cell_runs(&a, Keep::Sound), cell_runs(&b, Keep::Sound));
        assert_eq!(cells_changed(std::iter::once(("ddp", &a[0], &b[0]))), []);
    }

    #[test]
    fn environments_are_compared_field_by_field() {
        let a = [record(cell("ddp"), 1, &[1.0])];
        assert_eq!(environments_changed(&a, &a), []);
        let mut value = serde_json::to_value(&a[0].environment).unwrap();
        value["kernel"] = "9.9".into();
        value["memory_bytes"] = (value["memory_bytes"].as_u64().unwrap() + 4096).into();
        let environment: Environment = serde_json::from_value(value).unwrap();
        let b = [Record { environment, ..a[0].clone() }];
        let found = environments_changed(&a, &b);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].what.as_str(), found[0].after.as_str()), ("kernel", "9.9"));
        let mixed = environments_changed(&a, &[a[0].clone(), b[0].clone()]);
        assert!(mixed[0].after.contains(", 9.9"), "{mixed:?}");
    }
}
