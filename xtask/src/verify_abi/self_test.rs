//! Self-test of the comparison: it must detect mistakes that are inserted into our header.

use std::fs;

use anyhow::{Context, Result, bail, ensure};

use super::compare::{ArgumentNames, compare};
use super::{Absent, Generation, mismatches, required};
use crate::abi::Abi;
use crate::bindgen::{Source, bindings, header};

/// A mistake in our header: a text, its replacement, and the symbols that the comparison must report.
struct Mistake {
    description: &'static str,
    from: &'static str,
    to: &'static str,
    symbols: &'static [&'static str],
}

const MISTAKES: &[Mistake] = &[
    Mistake {
        description: "a status with another value",
        from: "ACL_ERROR_RT_CONTEXT_NULL = 107002",
        to: "ACL_ERROR_RT_CONTEXT_NULL = 107022",
        symbols: &["ACL_ERROR_RT_CONTEXT_NULL"],
    },
    Mistake {
        description: "a flag with another bit",
        from: "ACL_EVENT_IPC = 0x40",
        to: "ACL_EVENT_IPC = 0x80",
        symbols: &["ACL_EVENT_IPC"],
    },
    Mistake {
        description: "a value of an enumeration with another value",
        from: "ACL_MEMCPY_DEVICE_TO_DEVICE = 3",
        to: "ACL_MEMCPY_DEVICE_TO_DEVICE = 30",
        symbols: &["aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_DEVICE"],
    },
    Mistake {
        description: "an argument of another width",
        from: "aclrtMallocAlign32(void **devPtr, size_t size",
        to: "aclrtMallocAlign32(void **devPtr, uint32_t size",
        symbols: &["aclrtMallocAlign32"],
    },
    Mistake {
        description: "an argument with another sign",
        from: "aclrtSetDevice(int32_t deviceId)",
        to: "aclrtSetDevice(uint32_t deviceId)",
        symbols: &["aclrtSetDevice"],
    },
    Mistake {
        description: "arguments of two types in another order",
        from: "aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)",
        to: "aclrtStreamWaitEvent(aclrtEvent event, aclrtStream stream)",
        symbols: &["aclrtStreamWaitEvent"],
    },
    Mistake {
        description: "arguments of one type in another order",
        from: "aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId)",
        to: "aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t peerDeviceId, int32_t deviceId)",
        symbols: &["aclrtDeviceCanAccessPeer"],
    },
    Mistake {
        description: "an argument too few",
        from: "aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags)",
        to: "aclrtDeviceEnablePeerAccess(int32_t peerDeviceId)",
        symbols: &["aclrtDeviceEnablePeerAccess"],
    },
    Mistake {
        description: "a structure by pointer instead of by value",
        from: "aclrtIpcOpenEventHandle(aclrtIpcEventHandle handle",
        to: "aclrtIpcOpenEventHandle(aclrtIpcEventHandle *handle",
        symbols: &["aclrtIpcOpenEventHandle"],
    },
    Mistake {
        description: "another result",
        from: "aclError aclrtFree(",
        to: "void aclrtFree(",
        symbols: &["aclrtFree"],
    },
    Mistake {
        description: "a structure of another size",
        from: "#define ACL_IPC_EVENT_HANDLE_SIZE 64",
        to: "#define ACL_IPC_EVENT_HANDLE_SIZE 65",
        symbols: &["ACL_IPC_EVENT_HANDLE_SIZE", "aclrtIpcEventHandle"],
    },
    Mistake {
        description: "fields in another order",
        from: "    uint32_t id;\n    aclrtMemLocationType type;\n",
        to: "    aclrtMemLocationType type;\n    uint32_t id;\n",
        symbols: &["aclrtMemLocation"],
    },
    Mistake {
        description: "a field of another type of the same size",
        from: "    uint32_t pageSize;\n",
        to: "    int32_t pageSize;\n",
        symbols: &["aclrtPtrAttributes"],
    },
    Mistake {
        description: "a field too few",
        from: "    uint32_t rsv[4];\n",
        to: "",
        symbols: &["aclrtPtrAttributes"],
    },
    Mistake {
        description: "a function that no header has",
        from: "aclError aclrtFree(",
        to: "aclError aclrtUnknown(void);\naclError aclrtFree(",
        symbols: &["aclrtUnknown"],
    },
    Mistake {
        description: "a constant that no header has",
        from: "#define ACL_IPC_EVENT_HANDLE_SIZE 64",
        to: "#define ACL_IPC_EVENT_HANDLE_SIZE 64\n#define ACL_UNKNOWN 1",
        symbols: &["ACL_UNKNOWN"],
    },
    Mistake {
        description: "an enumeration value that no header has",
        from: "ACL_EVENT_RECORDED_STATUS_COMPLETE = 1,",
        to: "ACL_EVENT_RECORDED_STATUS_COMPLETE = 1, ACL_EVENT_RECORDED_STATUS_UNKNOWN = 2,",
        symbols: &["aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_UNKNOWN"],
    },
];

/// Inserts the mistakes one at a time, and returns their number.
///
/// # Errors
///
/// Fails if a mistake is not detected.
pub(super) fn run(newer: &Generation, older: &Generation) -> Result<usize> {
    let path = header();
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    for mistake in MISTAKES {
        let ours = insert(mistake, &text)
            .with_context(|| format!("cannot insert the mistake: {}", mistake.description))?;
        check_detected(mistake, &ours, newer)?;
    }
    check_required_list(&text, older)?;
    Ok(MISTAKES.len() + 1)
}

fn insert(mistake: &Mistake, text: &str) -> Result<Abi> {
    let count = text.matches(mistake.from).count();
    ensure!(count == 1, "{:?} occurs {count} times in our header, expected 1", mistake.from);
    Abi::read(&bindings(&Source::Text(text.replace(mistake.from, mistake.to)))?)
}

fn check_detected(mistake: &Mistake, ours: &Abi, newer: &Generation) -> Result<()> {
    let classes = compare(ours, &newer.abi, ArgumentNames::Compared);
    let mut reported = classes
        .iter()
        .flat_map(|class| class.different.iter().map(|difference| &difference.symbol).chain(&class.absent))
        .collect::<Vec<_>>();
    reported.sort();
    let mut expected = mistake.symbols.to_vec();
    expected.sort_unstable();
    ensure!(
        reported == expected && mismatches(newer, &classes, Absent::Error).len() == reported.len(),
        "with {} in our header, the comparison reported {reported:?} instead of {expected:?}",
        mistake.description
    );
    Ok(())
}

/// Checks that a required function which the older headers lack is detected.
fn check_required_list(text: &str, older: &Generation) -> Result<()> {
    let ours = Abi::read(&bindings(&Source::Text(text.to_owned()))?)?;
    let absent = &compare(&ours, &older.abi, ArgumentNames::Ignored)[0].absent;
    let Some(later) = absent.first() else {
        bail!("the older headers lack no function, so this check cannot run")
    };
    let lists = required::Lists::from([(required::REQUIRED.to_owned(), vec![later.clone()])]);
    let declared = ours.functions.keys().collect::<Vec<_>>();
    let found = required::mismatches(&lists, &declared, absent);
    ensure!(
        found.len() == 1 && found[0].contains(later.as_str()),
        "{later}, which the older headers lack, is on the list of required functions, but no mismatch was reported"
    );
    Ok(())
}
