//! Beside each result the reason: what connections, emulated links and threads did meanwhile.

use rig::link::Pipe;
use rig::record::{Axis, Measured};
use rig::stats::median;
use rig::why::Connection;

use super::charts::{each_group, name, varies};
use super::digest::{Case, Digest, Run};
use super::findings::congestion;
use super::html::{Page, Table};
use super::text::{figure, grouped, maybe, share};

pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    if digest.cases.iter().all(|case| case.step.is_none()) {
        return;
    }
    page.topic("why", "Reasons: connections, links, processors");
    page.small(
        "Medians over rounds. Counts are those of all ranks and connections together, from the first step to the last; round trip and window are \
         those of the median connection at the end. Sent again: retransmitted packets (TCP), or packets that were declared lost (QUIC). Wire by \
         payload: bytes that the network interfaces sent, headers included, divided by the bytes of gradients and parameters. Lost: packets that \
         the emulated link dropped at random. Overflowed: packets that it dropped because its queue was full. Late p99: the emulator delivered 99 % \
         of the packets less late than this.",
    );
    each_group(
        page,
        digest.groups(&[Axis::Strategy, Axis::Transport]),
        |cases| cases.iter().any(|case| case.step.is_some()),
        |page, _, cases| {
            let transports = varies(cases, Axis::Transport);
            let mut table = Table::new(
                &[
                    "cell",
                    "step (ms)",
                    "congestion control",
                    "sent again",
                    "share of packets",
                    "round trip (ms)",
                    "smallest round trip (ms)",
                    "window (kB)",
                    "wire by payload",
                    "lost",
                    "overflowed",
                    "late p99 (µs)",
                    "network threads (CPU s)",
                    "all threads (CPU s)",
                ],
                1,
            );
            cases
                .iter()
                .filter(|case| case.step.is_some())
                .for_each(|case| table.row(row(name(case, transports), case)));
            page.table(&table);
            missing(page, cases);
        },
    );
}

fn row(name: String, case: &Case<'_>) -> Vec<String> {
    let over_runs = |pick: &dyn Fn(&Measured) -> Option<f64>| {
        let runs = case.good.iter().filter_map(|run: &Run<'_>| pick(run.measured));
        median(&runs.filter(|value| value.is_finite()).collect::<Vec<_>>())
    };
    let sum = |pick: fn(&Connection) -> u64| {
        over_runs(&|measured| {
            let connections = connections(measured);
            (!connections.is_empty()).then(|| connections.iter().map(|one| pick(one)).sum::<u64>() as f64)
        })
    };
    let middle = |pick: fn(&Connection) -> Option<f64>| {
        over_runs(&|measured| median(&connections(measured).into_iter().filter_map(pick).collect::<Vec<_>>()))
    };
    let pipes = |pick: fn(&Pipe) -> u64| {
        over_runs(&|measured| {
            let pipes = &measured.link.emulator;
            (!pipes.is_empty()).then(|| pipes.iter().map(pick).sum::<u64>() as f64)
        })
    };
    let late = over_runs(&|measured| measured.link.emulator.iter().map(|pipe| pipe.late_p99_us).max_by(f64::total_cmp));
    let processor = |group: Option<&str>| {
        over_runs(&|measured| {
            let seconds = measured.ranks.iter().flat_map(|rank| &rank.network.cpu_s);
            let mut mine = seconds.filter(|(name, _)| group.is_none_or(|group| *name == group)).peekable();
            mine.peek()?;
            Some(mine.map(|(_, seconds)| seconds).sum())
        })
    };
    let (again, packets) = (sum(|one| one.retransmitted_packets), sum(|one| one.packets_sent));
    let of_packets = again.zip(packets).filter(|(_, packets)| *packets > 0.0).map(|(again, packets)| again / packets);
    let whole = |value: Option<f64>| value.map_or("–".into(), grouped);
    let control = congestion(case);
    vec![
        name,
        case.step_text(),
        if control.is_empty() { "–".into() } else { control.join(", ") },
        whole(again),
        of_packets.map_or("–".into(), share),
        maybe(middle(|one| Some(one.rtt_ms))),
        maybe(middle(|one| one.min_rtt_ms)),
        maybe(middle(|one| Some(one.congestion_window_bytes as f64 / 1e3))),
        over_runs(&wire_by_payload).map_or("–".into(), |ratio| format!("{}×", figure(ratio))),
        whole(pipes(|pipe| pipe.lost)),
        whole(pipes(|pipe| pipe.overflowed)),
        maybe(late),
        maybe(processor(Some("network"))),
        maybe(processor(None)),
    ]
}

fn connections(measured: &Measured) -> Vec<&Connection> {
    measured.ranks.iter().flat_map(|rank| &rank.network.connections).collect()
}

fn wire_by_payload(measured: &Measured) -> Option<f64> {
    let sent: u64 = measured.ranks.iter().map(|rank| Some(rank.network.interface?.bytes_sent)).sum::<Option<u64>>()?;
    let payload: u64 = measured.ranks.iter().map(|rank| rank.payload_bytes).sum::<Option<u64>>()?;
    let payload = payload as f64 * measured.seconds.len() as f64;
    (payload > 0.0).then(|| sent as f64 / payload)
}

/// Why some cells have no figures of connections.
fn missing(page: &mut Page, cases: &[&Case<'_>]) {
    let ranks = cases.iter().flat_map(|case| &case.good).flat_map(|run| &run.measured.ranks);
    for why in super::digest::distinct(ranks.filter_map(|rank| rank.network.missing.as_deref())) {
        page.small(&format!("Some cells have no figures of connections: {why}."));
    }
}
