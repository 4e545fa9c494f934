use super::*;

/// An interface in the form of bindgen's output.
const OURS: &str = r#"
pub type aclError = ::core::ffi::c_int;
pub const ACL_SUCCESS: aclError = 0;
pub const ACL_LOWEST: i64 = -1;
#[repr(transparent)]
pub struct aclrtStream(pub *mut ::core::ffi::c_void);
#[repr(transparent)]
pub struct aclrtEvent(pub *mut ::core::ffi::c_void);
impl aclrtKind {
    pub const ACL_KIND_ONE: aclrtKind = aclrtKind(1);
}
#[repr(transparent)]
pub struct aclrtKind(pub ::core::ffi::c_uint);
#[repr(C)]
pub struct aclrtPlace {
    pub id: u32,
    pub type_: aclrtKind,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of aclrtPlace"][::core::mem::size_of::<aclrtPlace>() - 8usize];
    ["Alignment of aclrtPlace"][::core::mem::align_of::<aclrtPlace>() - 4usize];
    ["Offset of field: aclrtPlace::id"][::core::mem::offset_of!(aclrtPlace, id) - 0usize];
    ["Offset of field: aclrtPlace::type_"][::core::mem::offset_of!(aclrtPlace, type_) - 4usize];
};
pub type aclrtCallback = ::core::option::Option<unsafe extern "C" fn(data: *mut ::core::ffi::c_void)>;
pub struct Acl {
    __library: ::libloading::Library,
    pub aclrtWait: Result<
        unsafe extern "C" fn(stream: aclrtStream, event: aclrtEvent) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtCopy: Result<
        unsafe extern "C" fn(to: *mut aclrtPlace, room: usize, from: *const aclrtPlace, count: usize) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtCall: Result<unsafe extern "C" fn(call: aclrtCallback) -> aclError, ::libloading::Error>,
}
"#;

/// Compares our interface with a copy in which texts are replaced.
fn compared(replaced: &[(&str, &str)], names: ArgumentNames) -> [Class; 4] {
    let mut theirs = OURS.to_owned();
    for (from, to) in replaced {
        assert_eq!(theirs.matches(from).count(), 1, "{from}");
        theirs = theirs.replace(from, to);
    }
    compare(&Abi::read(OURS).unwrap(), &Abi::read(&theirs).unwrap(), names)
}

/// Returns all symbols that are absent or different, with their class.
fn wrong(classes: &[Class; 4]) -> Vec<String> {
    let wrong = classes.iter().flat_map(|class| {
        let different = class.different.iter().map(|different| &different.symbol);
        different.chain(&class.absent).map(|symbol| format!("{}: {symbol}", class.name))
    });
    wrong.collect()
}

#[test]
fn equal_interfaces_have_no_differences() {
    let classes = compared(&[], ArgumentNames::Compared);
    assert_eq!(classes.each_ref().map(|class| class.ours), [3, 2, 1, 1]);
    assert_eq!(wrong(&classes), [""; 0]);
}

#[test]
fn equivalent_declarations_are_equal() {
    let replaced = [
        ("pub const ACL_SUCCESS: aclError = 0;", "pub const ACL_SUCCESS: u32 = 0;"),
        ("room: usize", "room: u64"),
        (
            "fn(stream: aclrtStream, event: aclrtEvent) -> aclError",
            "fn(stream: aclrtStream, event: aclrtEvent) -> i32",
        ),
        (
            "fn(call: aclrtCallback)",
            "fn(call: Option<unsafe extern \"C\" fn(data: *mut ::core::ffi::c_void)>)",
        ),
    ];
    assert_eq!(wrong(&compared(&replaced, ArgumentNames::Compared)), [""; 0]);
}

#[test]
fn additional_symbols_are_ignored() {
    let replaced = [
        ("pub const ACL_SUCCESS", "pub const ACL_NEWER: u32 = 7;\npub const ACL_SUCCESS"),
        (
            "    pub const ACL_KIND_ONE",
            "    pub const ACL_KIND_TWO: aclrtKind = aclrtKind(2);\n    pub const ACL_KIND_ONE",
        ),
    ];
    assert_eq!(wrong(&compared(&replaced, ArgumentNames::Compared)), [""; 0]);
}

#[test]
fn each_kind_of_difference_is_reported() {
    for (from, to, symbol) in [
        ("ACL_SUCCESS: aclError = 0", "ACL_SUCCESS: aclError = 1", "constants: ACL_SUCCESS"),
        ("ACL_LOWEST: i64 = -1", "ACL_LOWEST: i64 = 1", "constants: ACL_LOWEST"),
        ("pub const ACL_LOWEST: i64 = -1;", "", "constants: ACL_LOWEST"),
        ("aclrtKind(1)", "aclrtKind(2)", "enum values: aclrtKind::ACL_KIND_ONE"),
        ("event: aclrtEvent) -> aclError", "event: aclrtEvent) -> i64", "functions: aclrtWait"),
        (
            "stream: aclrtStream, event: aclrtEvent",
            "stream: aclrtEvent, event: aclrtStream",
            "functions: aclrtWait",
        ),
        ("stream: aclrtStream, event: aclrtEvent", "stream: aclrtStream", "functions: aclrtWait"),
        ("room: usize", "room: u32", "functions: aclrtCopy"),
        ("from: *const aclrtPlace", "from: *mut aclrtPlace", "functions: aclrtCopy"),
        ("to: *mut aclrtPlace", "to: aclrtPlace", "functions: aclrtCopy"),
        ("data: *mut ::core::ffi::c_void", "data: u64", "functions: aclrtCall"),
        ("pub aclrtWait:", "pub aclrtWaitForEvent:", "functions: aclrtWait"),
        ("size_of::<aclrtPlace>() - 8usize", "size_of::<aclrtPlace>() - 12usize", "structs: aclrtPlace"),
        ("align_of::<aclrtPlace>() - 4usize", "align_of::<aclrtPlace>() - 8usize", "structs: aclrtPlace"),
        ("(aclrtPlace, type_) - 4usize", "(aclrtPlace, type_) - 8usize", "structs: aclrtPlace"),
        ("    pub id: u32,", "    pub id: i32,", "structs: aclrtPlace"),
    ] {
        let classes = compared(&[(from, to)], ArgumentNames::Ignored);
        assert_eq!(wrong(&classes), [symbol], "{from} -> {to}");
    }
}

#[test]
fn argument_names_reveal_swapped_arguments() {
    let renamed = [("room: usize", "count_of_all: usize")];
    assert_eq!(wrong(&compared(&renamed, ArgumentNames::Ignored)), [""; 0]);
    assert_eq!(wrong(&compared(&renamed, ArgumentNames::Compared)), ["functions: aclrtCopy"]);
}

#[test]
fn difference_contains_both_declarations() {
    let classes = compared(&[("room: usize", "room: u32")], ArgumentNames::Compared);
    let Difference { symbol, ours, theirs } = &classes[0].different[0];
    assert_eq!(symbol, "aclrtCopy");
    assert!(ours.starts_with("(to: *mut struct aclrtPlace, room: u64,"), "{ours}");
    assert!(theirs.starts_with("(to: *mut struct aclrtPlace, room: u32,"), "{theirs}");
}

#[test]
fn unsupported_item_is_an_error() {
    for (from, to) in [
        ("ACL_SUCCESS: aclError = 0", "ACL_SUCCESS: aclError = other()"),
        ("room: usize", "room: Unknown"),
        ("size_of::<aclrtPlace>() - 8usize", "size_of::<aclrtPlace>() + 8usize"),
        ("    [\"Size of aclrtPlace\"][::core::mem::size_of::<aclrtPlace>() - 8usize];\n", ""),
    ] {
        assert_eq!(OURS.matches(from).count(), 1, "{from}");
        assert!(Abi::read(&OURS.replace(from, to)).is_err(), "{from} -> {to}");
    }
}
