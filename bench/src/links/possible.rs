//! Which links there can be on this machine.

use gpt2::cli::say;
use rig::link::{Profile, TestNetwork};

/// Leaves out the links that this machine cannot have, and prints once per reason which and why. Names that no profile has stay.
pub(crate) fn keep_possible(links: &mut Vec<String>) {
    let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
    links.retain(|name| {
        let why = Profile::find(name).ok().and_then(|profile| TestNetwork::unavailable_for(&profile));
        if let Some(why) = &why {
            match reasons.iter_mut().find(|(reason, _)| reason == why) {
                Some((_, names)) => names.push(name.clone()),
                None => reasons.push((why.clone(), vec![name.clone()])),
            }
        }
        why.is_none()
    });
    for (why, names) in reasons {
        say(format_args!(
            "{}: nothing is measured over this link, because it is not possible here: {why}",
            names.join(", ")
        ));
    }
}
