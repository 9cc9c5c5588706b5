use super::*;

/// `sizeof(ncclConfig_t)` in the headers of NCCL, from a C compiler for x86-64.
#[cfg(target_pointer_width = "64")]
#[test]
fn a_config_has_the_size_and_version_of_the_library_that_reads_it() {
    let of_headers = [
        ((2, 18, 1), 48),
        ((2, 21, 5), 48),
        ((2, 25, 1), 48),
        ((2, 26, 2), 48),
        ((2, 26, 6), 48),
        ((2, 27, 3), 72),
        ((2, 27, 7), 72),
        ((2, 28, 3), 80),
        ((2, 28, 9), 80),
        ((2, 29, 2), 88),
        ((2, 29, 7), 88),
        ((2, 30, 3), 96),
        ((2, 30, 7), 96),
        ((2, 31, 2), 112),
        ((2, 32, 3), 120),
    ];
    for ((major, minor, patch), size) in of_headers {
        let version = Version::new(major, minor, patch);
        let config = ncclConfig_t::fitting(version);
        assert_eq!((config.size, config.version), (size, version.code()), "{version}");
    }
}

#[test]
fn a_library_that_is_newer_gets_the_newest_config_that_is_known() {
    let config = ncclConfig_t::fitting(Version::new(3, 0, 0));
    let newest = (size_of::<ncclConfig_t>(), Version::NEWEST.code());
    assert_eq!((config.size, config.version), newest);
    assert_eq!(config.magic, 0xcafe_beef);
}

/// Also the fields in the padding behind the last field that an older library has.
#[test]
fn everything_is_left_to_nccl() {
    let config = ncclConfig_t::fitting(Version::OLDEST);
    assert!(config.netName.is_null() && config.commName.is_null());
    let numbers = [
        config.blocking,
        config.minCTAs,
        config.maxCTAs,
        config.splitShare,
        config.trafficClass,
        config.maxP2pPeers,
        config.graphStreamOrdering,
        config.nvlsHostMode,
    ];
    assert_eq!(numbers, [c_int::MIN; 8]);
}
