use super::*;
use crate::model::lease::LeaseState;
use crate::wire::ListedHolder;

#[test]
fn listing_contains_no_terminal_control_characters() {
    let harmful = "\u{1b}[2Ja\u{202e}b\n";
    let holder = ListedHolder { pid: 1, program: harmful.into(), held_ms: 0, state: LeaseState::InUse };
    let export = shown(ListedExport {
        export: ExportId(1),
        backend: harmful.repeat(100),
        bytes: 0,
        age_ms: 0,
        opened: 0,
        dropped: false,
        holders: vec![holder],
        held_by: 1,
        idle: 0,
    });
    assert_eq!(export.holders[0].program, "\u{fffd}[2Ja\u{fffd}b\u{fffd}");
    assert!(export.backend.starts_with("\u{fffd}[2Ja") && export.backend.len() <= 64);
}
