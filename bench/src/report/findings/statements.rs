//! Sentences about what came out.

use crate::report::html::{Mark, Page};

/// How many are shown before the rest is folded.
const SHOWN: usize = 12;

/// Statements of one kind.
pub(super) type Statements = Vec<(Mark, String)>;

/// Writes statements, the later ones of many folded; of none nothing.
pub(super) fn said(page: &mut Page, mut statements: Statements) {
    if statements.is_empty() {
        return;
    }
    let rest = statements.split_off(SHOWN.min(statements.len()));
    page.statements(&statements);
    if !rest.is_empty() {
        page.folded(&format!("{} more", rest.len()), |page| page.statements(&rest));
    }
}
