"""What a host's build sees after `meson install`: a header, a library, and a pkg-config file that finds both."""
import os
import pathlib
import shutil
import sys

import pytest

from conftest import BUILD, dlpack_flags, run

PROGRAM = r"""
#include <stdio.h>
#include <fsdp.h>

int main(void)
{
    fsdp_group *group;
    fsdp_group_info info = {.struct_size = sizeof(info)};
    const fsdp_api *api;
    if (fsdp_get_api(FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, &api) != FSDP_OK) return 1;
    if (fsdp_group_create(NULL, NULL, &group) != FSDP_OK) return puts(fsdp_last_error()), 2;
    if (api->group_query(group, &info) != FSDP_OK) return 3;
    fsdp_group_release(group);
    printf("%d %d of %d\n", (int)fsdp_version(), (int)info.rank, (int)info.size);
    return 0;
}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The root of an installed tree."""
    root = tmp_path_factory.mktemp("installed")
    beside_python = pathlib.Path(sys.executable).with_name("meson")
    meson = str(beside_python) if beside_python.exists() else shutil.which("meson")
    assert meson, "meson is not installed"
    run(meson, "install", "-C", BUILD, "--no-rebuild", "--destdir", root)
    return root


@pytest.fixture(scope="module")
def pkg_config(installed):
    file, = installed.rglob("libfsdp.pc")
    environment = dict(os.environ, PKG_CONFIG_PATH="", PKG_CONFIG_LIBDIR=str(file.parent),
                       PKG_CONFIG_SYSROOT_DIR=str(installed))

    def ask(*flags):
        return run("pkg-config", *flags, "libfsdp", env=environment).split()

    return ask


def test_program_builds_and_runs_against_the_installed_tree(installed, pkg_config, tmp_path):
    source = tmp_path / "program.c"
    source.write_text(PROGRAM)
    run("cc", "-std=c11", "-Wall", "-Werror", source, "-o", tmp_path / "program", *dlpack_flags(),
        *pkg_config("--cflags", "--libs"))
    folder = next(installed.rglob("libfsdp.so")).parent
    assert run(tmp_path / "program", env={"LD_LIBRARY_PATH": str(folder)}) == "100 0 of 1\n"


def test_version_is_the_headers(pkg_config):
    assert pkg_config("--modversion") == ["0.1.0"]


def test_names_of_the_library(installed):
    links = {path.name: os.readlink(path) if path.is_symlink() else None for path in installed.rglob("libfsdp.so*")}
    assert links == {"libfsdp.so": "libfsdp.so.0", "libfsdp.so.0": "libfsdp.so.0.1.0", "libfsdp.so.0.1.0": None}


def test_nothing_but_the_product_is_installed(installed):
    names = {path.name for path in installed.rglob("*") if path.is_file() and not path.is_symlink()}
    assert names == {"fsdp.h", "libfsdp.so.0.1.0", "libfsdp.pc"}
