"""`python -m llm_functionalities.download`: fetches the files that `downloads.toml` lists and that do not exist yet."""

import argparse
import sys
from pathlib import Path

import httpx2

from llm_functionalities.download.config import DownloadError, Downloads, Source, read_downloads
from llm_functionalities.download.source import fetch_source

PROGRAM = "llm_functionalities.download"
CONFIG = Path(__file__).resolve().parent.parent / "downloads.toml"


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__)
    parser.add_argument("sources", nargs="*", metavar="ID", help="sources to fetch; all enabled ones unless named")
    parser.add_argument("--config", type=Path, default=CONFIG, help="what to fetch (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="fetch existing files again")
    parser.add_argument("--allow-http", action="store_true", help="also fetch files without a sha256 over http://")
    arguments = parser.parse_args()
    try:
        downloads = read_downloads(arguments.config)
        chosen = _choose(downloads, arguments.sources)
    except DownloadError as error:
        _fail(error)
    if not _fetch(downloads, chosen, arguments.force, arguments.allow_http):
        sys.exit(1)


def _choose(downloads: Downloads, ids: list[str]) -> list[Source]:
    """Returns the sources with these ids, enabled or not; without ids, all enabled sources."""
    if not ids:
        return [source for source in downloads.sources if source.enabled] if downloads.enabled else []
    known = {source.id: source for source in downloads.sources}
    if unknown := next((name for name in ids if name not in known), None):
        raise DownloadError(f"there is no source {unknown!r}; there are: {', '.join(known) or 'none'}")
    return [known[name] for name in ids]


def _fetch(downloads: Downloads, chosen: list[Source], force: bool, allow_http: bool) -> bool:
    """Fetches one source after another, even if some fail. Returns True if none failed."""
    if not chosen:
        _say(f"{downloads.name}: nothing is enabled")
    whole = True
    with httpx2.Client(timeout=downloads.http_timeout, follow_redirects=True) as client:
        for source in chosen:
            folder = downloads.folder(source)
            try:
                fetched = fetch_source(
                    source, folder, client, force=force or source.force, allow_http=allow_http, log=_say
                )
            except DownloadError as error:
                whole = False
                _say(str(error))
            else:
                _say(f"{source.id}: {'fetched' if fetched else 'already'} in {folder}")
    return whole


def _say(line: str) -> None:
    print(f"{PROGRAM}: {line}", file=sys.stderr)


def _fail(error: DownloadError) -> None:
    for line in str(error).splitlines():
        _say(line)
    sys.exit(2)


if __name__ == "__main__":
    main()
