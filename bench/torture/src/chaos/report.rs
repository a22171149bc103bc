//! The table at the end.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::cell::Row;
use super::options::Settings;
use crate::ranks::fault::Fault;
use crate::ranks::protocol::{DropReport, ErrorReport, IDLE};

/// Everything about a cell that is not as it should be.
pub(crate) fn exception(row: &Row) -> String {
    let times: Vec<String> = row.detection_ms.iter().map(|ms| format!("{ms:.0} ms")).collect();
    let mut text = format!("WRONG: {} (ended after {})", row.cell.name(), times.join(", "));
    for why in &row.wrong {
        let _ = write!(text, "\n    {}", why.replace('\n', "\n        "));
    }
    text
}

/// One line for each fault, rank and transport; then what was left out, and the exceptions again.
pub(crate) fn table(rows: &[Row], settings: &Settings) -> String {
    let mut groups: BTreeMap<_, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        let place = settings.cells.len();
        let order = Fault::ALL.iter().position(|fault| *fault == row.cell.fault).unwrap_or(place);
        let key = (order, row.cell.victim, row.cell.transport.name());
        groups.entry(key).or_default().push(row);
    }
    let mut text =
        String::from("fault      rank transport cells   ok  median ms     max ms   bound ms  what was said\n");
    for ((_, victim, transport), rows) in &groups {
        let Some(first) = rows.first() else { continue };
        let mut times: Vec<f64> = rows.iter().flat_map(|row| row.detection_ms.iter().copied()).collect();
        times.sort_by(f64::total_cmp);
        let at = |index: usize| times.get(index).map_or("-".to_string(), |ms| format!("{ms:.1}"));
        let bound = if first.cell.fault.is_harmless() { "-".into() } else { first.bound_ms.to_string() };
        let (median, most) = if first.cell.fault.is_harmless() {
            ("-".into(), "-".into())
        } else {
            (at(times.len().saturating_sub(1) / 2), at(times.len().wrapping_sub(1)))
        };
        let ok = rows.iter().filter(|row| row.wrong.is_empty()).count();
        let _ = writeln!(
            text,
            "{:10} {victim:>4} {transport:9} {:>5} {ok:>4} {median:>10} {most:>10} {bound:>10}  {}",
            first.cell.fault,
            rows.len(),
            said(rows)
        );
    }
    text.push_str(&left_out(settings));
    let _ = writeln!(text, "{}", afterwards(rows));
    for row in rows {
        if let Some(remark) = row.remarks.first() {
            let _ = writeln!(text, "could be better: {}: {remark}", row.cell.name());
        }
    }
    let wrong: Vec<&Row> = rows.iter().filter(|row| !row.wrong.is_empty()).collect();
    wrong.iter().for_each(|row| {
        let _ = writeln!(text, "{}", exception(row));
    });
    let hangs = wrong.iter().filter(|row| row.wrong.iter().any(|why| why.contains("HANGS"))).count();
    let elements: u64 = rows.iter().flat_map(|row| &row.survivors).map(|survivor| survivor.wrong_elements).sum();
    let checked: u64 = rows.iter().flat_map(|row| &row.survivors).map(|survivor| survivor.checked).sum();
    let differ = rows.iter().filter(|row| !row.same_text).count();
    let _ = write!(
        text,
        "{} cells: {} ok, {} not ok; {hangs} hung; {elements} of {checked} elements wrong; in {differ} cells the survivors reported different errors",
        rows.len(),
        rows.len() - wrong.len(),
        wrong.len()
    );
    text
}

/// What was not run, and why.
fn left_out(settings: &Settings) -> String {
    #[derive(Default)]
    struct Places {
        transports: Vec<&'static str>,
        moments: Vec<&'static str>,
    }
    let mut reasons: BTreeMap<_, Places> = BTreeMap::new();
    for (fault, transport, when, why) in &settings.left_out {
        let places = reasons.entry((*fault, *why)).or_default();
        for (names, name) in [(&mut places.transports, transport.name()), (&mut places.moments, when.name())] {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    let mut text = String::new();
    for ((fault, why), Places { transports, moments }) in reasons {
        let _ = writeln!(text, "n/a: {fault} over {}, {}: {why}", transports.join(", "), moments.join(", "));
    }
    text
}

/// What survivors did after their end.
fn afterwards(rows: &[Row]) -> String {
    let survivors = || rows.iter().flat_map(|row| &row.survivors);
    let cpu = survivors().filter_map(|survivor| survivor.idle_cpu_ms).fold(0.0, f64::max);
    let dropped = || survivors().filter_map(|survivor| survivor.dropped.as_ref());
    let slowest = dropped().map(|dropped| dropped.took_ns).max().unwrap_or(0) as f64 / 1e6;
    let clean = |dropped: &&DropReport| {
        dropped.after.descriptors <= dropped.before.descriptors && dropped.after.threads <= dropped.before.threads
    };
    format!(
        "after their error survivors used at most {cpu:.1} ms of processor time in {} ms; dropping the communicator took at most \
         {slowest:.0} ms, after which {} of {} had as many descriptors and threads as before connecting",
        IDLE.as_millis(),
        dropped().filter(clean).count(),
        survivors().count()
    )
}

/// What survivors said, the most frequent first.
fn said(rows: &[&Row]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for row in rows {
        for survivor in &row.survivors {
            *counts
                .entry(survivor.error.as_ref().map_or("no error".into(), |told| short(told, row.cell.victim)))
                .or_default() += 1;
        }
    }
    let mut counts: Vec<(String, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let all: Vec<String> = counts.iter().map(|(text, count)| format!("{count}× {text}")).collect();
    all.join("; ")
}

/// Kind and ranks, as seen from the victim.
fn short(told: &ErrorReport, victim: usize) -> String {
    let who = |rank: usize| if rank == victim { "victim".to_string() } else { "another".to_string() };
    let names = told.names();
    let named = if names.contains(&victim) { "the victim" } else { "others" };
    match (told.kind.as_str(), told.by) {
        ("timeout", Some(by)) => format!("timeout of {} for {named}", who(by)),
        (kind, _) if names.is_empty() => kind.to_string(),
        (kind, _) => format!("{kind}: {named}"),
    }
}
