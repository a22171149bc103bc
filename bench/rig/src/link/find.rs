//! Profiles by their names, or the paths of their files.

use std::path::Path;

use super::options::LinkOptions;
use super::profile::Profile;
use super::profile_file;
use crate::folder::read_small;

/// Profiles that are part of this program, so that it can be moved.
const BUILT_IN: [(&str, &str); 13] = [
    ("loopback", include_str!("../../../profiles/loopback.toml")),
    ("unlimited", include_str!("../../../profiles/unlimited.toml")),
    ("lan-10g", include_str!("../../../profiles/lan-10g.toml")),
    ("lan-1g", include_str!("../../../profiles/lan-1g.toml")),
    ("lan-100m", include_str!("../../../profiles/lan-100m.toml")),
    ("lan-10m", include_str!("../../../profiles/lan-10m.toml")),
    ("wan-near", include_str!("../../../profiles/wan-near.toml")),
    ("wan", include_str!("../../../profiles/wan.toml")),
    ("wan-lossy", include_str!("../../../profiles/wan-lossy.toml")),
    ("mobile", include_str!("../../../profiles/mobile.toml")),
    ("home", include_str!("../../../profiles/home.toml")),
    ("slow-rank", include_str!("../../../profiles/slow-rank.toml")),
    ("incast", include_str!("../../../profiles/incast.toml")),
];

impl Profile {
    /// The profile of this name, or in the file at this path: what holds a slash or ends with `.toml` is a path. A rate with an MTU is the
    /// name of a link of its own: see [`LinkOptions`].
    ///
    /// # Errors
    /// What is wrong with it, with file and key, for the user.
    pub fn find(name: &str) -> Result<Self, String> {
        if name.contains('/') || name.ends_with(".toml") {
            let path = Path::new(name);
            let text = read_small(path).map_err(|why| format!("the profile {why}"))?;
            let stem = path.file_stem().map_or(name.into(), |stem| stem.to_string_lossy());
            return profile_file::parse(&stem, name, &text);
        }
        if LinkOptions::is_one(name) {
            return Ok(name.parse::<LinkOptions>()?.profile());
        }
        let text = BUILT_IN.iter().find_map(|(known, text)| (*known == name).then_some(text)).ok_or_else(|| {
            let names = Profile::names().collect::<Vec<_>>().join(", ");
            format!(
                "unknown link '{name}', expected one of {names}, or the path of a profile file, which ends with .toml"
            )
        })?;
        profile_file::parse(name, &format!("{name}.toml"), text)
    }

    /// Names of the profiles that are part of this program.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }
}
