from oatmill.cli import main

main()
