//! The machines of ranks that a launcher has started, and how far their clocks could be compared.

use rig::record::{ClockOffset, Host, Measured, Record};
use rig::stats::median;

use super::digest::{Digest, distinct};
use super::html::{Page, Table};
use super::text::{count, figure, listed};

/// Machines and ranks that are named.
const NAMED: usize = 8;

/// The machines of all runs, each with its ranks, in the order in which they are named first, and the offsets of its clock, run by run.
fn hosts(records: &[Record]) -> Vec<(&Host, Vec<ClockOffset>)> {
    let all = || records.iter().filter_map(|record| record.measured.as_ref()).flat_map(|measured| &measured.hosts);
    let same = |a: &Host, b: &Host| a.name == b.name && a.ranks == b.ranks;
    let mut found: Vec<(&Host, Vec<ClockOffset>)> = Vec::new();
    for host in all() {
        let known = found.iter().position(|(other, _)| same(other, host)).unwrap_or_else(|| {
            found.push((host, Vec::new()));
            found.len() - 1
        });
        found[known].1.extend(host.clock);
    }
    found
}

/// Where the ranks were, in a sentence; nothing where one machine had them all.
pub(super) fn sentence(digest: &Digest<'_>) -> Option<String> {
    let hosts = hosts(&digest.results.records);
    if hosts.len() < 2 {
        return None;
    }
    let named = |(host, _): &(&Host, Vec<ClockOffset>)| format!("{} ({})", host.name, ranks(host));
    let named: Vec<String> = distinct(hosts.iter().map(named));
    let worst = digest.results.records.iter().filter_map(|record| error_of(record.measured.as_ref()?)).reduce(f64::max);
    let clocks = worst.map_or(String::new(), |worst| {
        format!(" Their clocks are known to {} ms, and waits for late ranks no better.", figure(worst))
    });
    Some(format!("The ranks were on {}: {}.{clocks}", count(named.len(), "machine"), listed(&named, NAMED)))
}

/// By how much times of two machines of a run may be apart, in milliseconds: two that are both not rank 0's are compared by way of it.
fn error_of(measured: &Measured) -> Option<f64> {
    let mut errors: Vec<f64> =
        measured.hosts.iter().filter_map(|host| host.clock).map(|clock| clock.error_ms).collect();
    errors.sort_by(|a, b| b.total_cmp(a));
    (!errors.is_empty()).then(|| errors.iter().take(2).sum())
}

fn ranks(host: &Host) -> String {
    let numbers: Vec<String> = host.ranks.iter().map(ToString::to_string).collect();
    let word = if numbers.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", listed(&numbers, NAMED))
}

/// The machines and their clocks.
pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    let hosts = hosts(&digest.results.records);
    if hosts.is_empty() {
        return;
    }
    let head =
        ["machine", "ranks", "clock ahead of rank 0's (ms)", "error, median (ms)", "error, largest (ms)", "drift (ms)"];
    let mut table = Table::new(&head, 2);
    for (host, clocks) in hosts {
        let errors: Vec<f64> = clocks.iter().map(|clock| clock.error_ms).collect();
        let largest = errors.iter().copied().reduce(f64::max);
        let offsets = || clocks.iter().map(|clock| clock.offset_ms);
        let drift = offsets().next_back().zip(offsets().next()).map(|(last, first)| last - first);
        // To the microsecond, whatever the machines' ages.
        let exact = |value: Option<f64>| value.map_or("–".into(), |value| format!("{value:.3}"));
        let numbers = [offsets().next(), median(&errors), largest, drift].map(exact);
        table.row([vec![host.name.clone(), ranks(host)], numbers.to_vec()].concat());
    }
    page.heading("Machines");
    page.text(
        "Clocks are the monotonic ones, which begin with their machines. They were compared by round trips before and after each run; the error is \
         half of the shortest round trip, and what they drifted apart meanwhile. Drift here is that from the first run to the last.",
    );
    page.table(&table);
}

#[cfg(test)]
mod tests {
    use rig::results::Results;
    use rig::stats::made_up;

    use super::*;

    #[test]
    fn machines_are_named_with_the_error_of_their_clocks() {
        let clock = |offset_ms, error_ms| Some(ClockOffset { offset_ms, error_ms, ..ClockOffset::default() });
        let run = |round, clock| {
            let mut record = made_up::record(made_up::cell("ddp"), round, &[1.0, 2.0]);
            let host = |name: &str, ranks: &[usize], clock| Host { name: name.into(), ranks: ranks.into(), clock };
            record.measured.as_mut().unwrap().hosts = vec![host("a", &[0, 1], None), host("b", &[2], clock)];
            record
        };
        let records = vec![run(1, clock(86_400_000.25, 0.04)), run(2, clock(86_400_000.5, 0.06))];
        let results = Results { file: "x".into(), records, warnings: Vec::new(), whole_bytes: 0 };
        let digest = Digest::of(&results, &[]);
        let said = sentence(&digest).unwrap();
        assert!(
            said.contains("on 2 machines: a (ranks 0, 1), b (rank 2).") && said.contains("known to 0.060 ms"),
            "{said}"
        );
        let mut page = Page::default();
        write(&mut page, &digest);
        let html = page.finish("x");
        for text in ["86400000.250", "0.050", "0.060", "0.250"] {
            assert!(html.contains(text), "{text}: {html}");
        }
    }

    #[test]
    fn nothing_is_said_of_one_machine() {
        let results = Results {
            file: "x".into(),
            records: vec![made_up::record(made_up::cell("ddp"), 1, &[1.0])],
            warnings: Vec::new(),
            whole_bytes: 0,
        };
        assert_eq!(sentence(&Digest::of(&results, &[])), None);
    }
}
