//! Mistakes that the comparison has to find: a comparison that finds nothing proves nothing.

use std::fs;

use anyhow::{Context, Result, bail, ensure};

use super::abi::Abi;
use super::compare::{ArgumentNames, compare};
use super::{Absent, Generation, complaints, required};
use crate::bindgen::{Source, bindings, header};

/// A mistake in our header: text, what takes its place, and the symbols that have to be named.
struct Mistake {
    what: &'static str,
    from: &'static str,
    to: &'static str,
    found: &'static [&'static str],
}

const MISTAKES: &[Mistake] = &[
    Mistake {
        what: "a status with another number",
        from: "ACL_ERROR_RT_CONTEXT_NULL = 107002",
        to: "ACL_ERROR_RT_CONTEXT_NULL = 107022",
        found: &["ACL_ERROR_RT_CONTEXT_NULL"],
    },
    Mistake {
        what: "a flag with another bit",
        from: "ACL_EVENT_IPC = 0x40",
        to: "ACL_EVENT_IPC = 0x80",
        found: &["ACL_EVENT_IPC"],
    },
    Mistake {
        what: "a value of an enumeration with another number",
        from: "ACL_MEMCPY_DEVICE_TO_DEVICE = 3",
        to: "ACL_MEMCPY_DEVICE_TO_DEVICE = 30",
        found: &["aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_DEVICE"],
    },
    Mistake {
        what: "an argument of another width",
        from: "aclrtMallocAlign32(void **devPtr, size_t size",
        to: "aclrtMallocAlign32(void **devPtr, uint32_t size",
        found: &["aclrtMallocAlign32"],
    },
    Mistake {
        what: "an argument with another sign",
        from: "aclrtSetDevice(int32_t deviceId)",
        to: "aclrtSetDevice(uint32_t deviceId)",
        found: &["aclrtSetDevice"],
    },
    Mistake {
        what: "arguments of two types in another order",
        from: "aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)",
        to: "aclrtStreamWaitEvent(aclrtEvent event, aclrtStream stream)",
        found: &["aclrtStreamWaitEvent"],
    },
    Mistake {
        what: "arguments of one type in another order",
        from: "aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId)",
        to: "aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t peerDeviceId, int32_t deviceId)",
        found: &["aclrtDeviceCanAccessPeer"],
    },
    Mistake {
        what: "an argument too few",
        from: "aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags)",
        to: "aclrtDeviceEnablePeerAccess(int32_t peerDeviceId)",
        found: &["aclrtDeviceEnablePeerAccess"],
    },
    Mistake {
        what: "a structure by pointer instead of by value",
        from: "aclrtIpcOpenEventHandle(aclrtIpcEventHandle handle",
        to: "aclrtIpcOpenEventHandle(aclrtIpcEventHandle *handle",
        found: &["aclrtIpcOpenEventHandle"],
    },
    Mistake {
        what: "another result",
        from: "aclError aclrtFree(",
        to: "void aclrtFree(",
        found: &["aclrtFree"],
    },
    Mistake {
        what: "a structure of another size",
        from: "#define ACL_IPC_EVENT_HANDLE_SIZE 64",
        to: "#define ACL_IPC_EVENT_HANDLE_SIZE 65",
        found: &["ACL_IPC_EVENT_HANDLE_SIZE", "aclrtIpcEventHandle"],
    },
    Mistake {
        what: "fields in another order",
        from: "    uint32_t id;\n    aclrtMemLocationType type;\n",
        to: "    aclrtMemLocationType type;\n    uint32_t id;\n",
        found: &["aclrtMemLocation"],
    },
    Mistake {
        what: "a field of another type of the same size",
        from: "    uint32_t pageSize;\n",
        to: "    int32_t pageSize;\n",
        found: &["aclrtPtrAttributes"],
    },
    Mistake {
        what: "a field too few",
        from: "    uint32_t rsv[4];\n",
        to: "",
        found: &["aclrtPtrAttributes"],
    },
    Mistake {
        what: "a function that nobody has",
        from: "aclError aclrtFree(",
        to: "aclError aclrtNobodyHasThis(void);\naclError aclrtFree(",
        found: &["aclrtNobodyHasThis"],
    },
    Mistake {
        what: "a constant that nobody has",
        from: "#define ACL_IPC_EVENT_HANDLE_SIZE 64",
        to: "#define ACL_IPC_EVENT_HANDLE_SIZE 64\n#define ACL_NOBODY_HAS_THIS 1",
        found: &["ACL_NOBODY_HAS_THIS"],
    },
    Mistake {
        what: "an enumeration's value that nobody has",
        from: "ACL_EVENT_RECORDED_STATUS_COMPLETE = 1,",
        to: "ACL_EVENT_RECORDED_STATUS_COMPLETE = 1, ACL_EVENT_RECORDED_STATUS_NOBODY_HAS_THIS = 2,",
        found: &["aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_NOBODY_HAS_THIS"],
    },
];

/// Makes the mistakes, one at a time. Tells how many.
///
/// # Errors
///
/// Where one is not found.
pub(super) fn run(newer: &Generation, older: &Generation) -> Result<usize> {
    let path = header();
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    for mistake in MISTAKES {
        let ours = with(mistake, &text).with_context(|| format!("making a mistake: {}", mistake.what))?;
        find(mistake, &ours, newer)?;
    }
    require_what_came_later(&text, older)?;
    Ok(MISTAKES.len() + 1)
}

fn with(mistake: &Mistake, text: &str) -> Result<Abi> {
    let count = text.matches(mistake.from).count();
    ensure!(count == 1, "{:?} stands in our header {count} times, not once", mistake.from);
    Abi::read(&bindings(&Source::Text(text.replace(mistake.from, mistake.to)))?)
}

fn find(mistake: &Mistake, ours: &Abi, newer: &Generation) -> Result<()> {
    let classes = compare(ours, &newer.abi, ArgumentNames::Count);
    let mut named = classes
        .iter()
        .flat_map(|class| class.different.iter().map(|difference| &difference.symbol).chain(&class.absent))
        .collect::<Vec<_>>();
    named.sort();
    let mut expected = mistake.found.to_vec();
    expected.sort_unstable();
    ensure!(
        named == expected && complaints(newer, &classes, Absent::Refused).len() == named.len(),
        "with {} in our header, {named:?} came out as wrong, and not {expected:?}",
        mistake.what
    );
    Ok(())
}

/// A function that the older headers lack, on the list of those that we cannot do without.
fn require_what_came_later(text: &str, older: &Generation) -> Result<()> {
    let ours = Abi::read(&bindings(&Source::Text(text.to_owned()))?)?;
    let absent = &compare(&ours, &older.abi, ArgumentNames::Ignored)[0].absent;
    let Some(later) = absent.first() else { bail!("the older headers lack nothing: this proves nothing") };
    let lists = required::Lists::from([(required::REQUIRED.to_owned(), vec![later.clone()])]);
    let declared = ours.functions.keys().collect::<Vec<_>>();
    let found = required::complaints(&lists, &declared, absent);
    ensure!(
        found.len() == 1 && found[0].contains(later.as_str()),
        "{later}, which the older headers lack, was put on the list of required functions, and nothing was said"
    );
    Ok(())
}
