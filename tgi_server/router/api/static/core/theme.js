// The theme that was chosen, before anything is drawn; else the system's.
const theme = localStorage.getItem("oatmill-theme");
if (theme) document.documentElement.dataset.theme = theme;
