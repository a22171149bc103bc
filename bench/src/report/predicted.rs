//! What was predicted before it was measured, where predictions lie beside the results.

use std::path::Path;

use rig::record::Record;

use super::html::Page;
use crate::predict::{Comparison, PICTURE_TITLE, PREDICTIONS};

pub(super) fn write(page: &mut Page, folder: &Path, records: &[Record]) {
    let predictions = folder.join(PREDICTIONS);
    if !predictions.is_file() {
        return;
    }
    page.topic("predicted", PICTURE_TITLE);
    match Comparison::of(&predictions, records) {
        Ok(comparison) => {
            comparison.sentences().iter().for_each(|sentence| page.text(sentence));
            let caption =
                "Each mark is a cell, with the bounds of its prediction; on the dashed line both are the same.";
            page.figure("predicted", comparison.picture(), caption);
        }
        Err(why) => page.warning(&why),
    }
}
